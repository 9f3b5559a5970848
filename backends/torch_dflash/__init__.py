"""The PyTorch backend of dflash: CUDA and CPU."""
