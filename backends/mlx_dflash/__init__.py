"""DFlash on Apple MLX: any mlx-lm model as target, on Metal and on MLX's CPU build."""
