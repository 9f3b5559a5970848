// What surrounds the panels on the server's page: a sentence on hover and focus for every control, and the switch between
// light and dark. An exported page has no controls and does not call this.
(function (DFlash) {
  "use strict";

  // `sentences`: element id → sentence. Controls come and go with their tabs, so they are looked up when pointed at.
  DFlash.controls = function (sentences) {
    const name = (event) => {
      const control = event.target.closest && event.target.closest('[id^="dflash-"]');
      if (control && sentences[control.id] && !control.dataset.tip) control.dataset.tip = sentences[control.id];
    };
    document.addEventListener("mouseover", name, true);
    document.addEventListener("focusin", name, true);
    document.addEventListener("click", (event) => {
      if (event.target.closest && event.target.closest(".dflash .theme")) document.body.classList.toggle("dark");
    });
    const ready = () => DFlash.tips(document.body);
    if (document.body) ready();
    else document.addEventListener("DOMContentLoaded", ready);
  };
})(window.DFlash);
