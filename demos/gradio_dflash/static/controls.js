// What surrounds the panels on the server's page: a sentence on hover and focus for every control, and the switch between
// light and dark. An exported page has no controls and does not call this.
(function (DFlash) {
  "use strict";

  // What a button starts may lie below the window on a phone: button → panel.
  const SHOWN_BY = [["dflash-generate", "dflash-player"], ["dflash-race-start", "dflash-race"], ["dflash-look", "dflash-conditioning"]];
  const TAB_MS = 400; // until the panel's tab is the open one
  function reveal(panel) {
    const element = document.getElementById(panel);
    if (!element || element.getBoundingClientRect().top < 0.7 * window.innerHeight) return;
    element.scrollIntoView({ behavior: DFlash.still() ? "auto" : "smooth", block: "start" });
  }

  // `sentences`: element id → sentence. Controls come and go with their tabs, so they are looked up when pointed at.
  DFlash.controls = function (sentences) {
    const name = (event) => {
      const control = event.target.closest && event.target.closest('[id^="dflash-"]');
      if (control && sentences[control.id] && !control.dataset.tip) control.dataset.tip = sentences[control.id];
    };
    document.addEventListener("mouseover", name, true);
    document.addEventListener("focusin", name, true);
    document.addEventListener("click", (event) => {
      if (!event.target.closest) return;
      if (event.target.closest(".dflash .theme")) document.body.classList.toggle("dark");
      for (const [button, panel] of SHOWN_BY) if (event.target.closest("#" + button)) setTimeout(reveal, TAB_MS, panel);
    });
    const ready = () => DFlash.tips(document.body);
    if (document.body) ready();
    else document.addEventListener("DOMContentLoaded", ready);
  };
})(window.DFlash);
