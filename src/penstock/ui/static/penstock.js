"use strict";
// Keeps a page up to date: at every tick of the server the page is fetched again, and its live parts are exchanged.
(() => {
  const offline = document.getElementById("offline");
  let busy = false, again = false;

  async function refresh() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch(location.href, { headers: { "x-live": "1" } });
      if (answer.ok && document.querySelector("main[data-waits]")) {
        location.reload();
      } else if (answer.ok || answer.status === 503) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const old of document.querySelectorAll("[data-live][id]")) {
          const now = fresh.getElementById(old.id);
          if (now && now.outerHTML !== old.outerHTML && !old.contains(document.activeElement)) {
            const left = old.scrollLeft;
            old.replaceWith(now);
            now.scrollLeft = left;
          }
        }
      }
    } catch { /* the stream of events says that it is away */ }
    busy = false;
    if (again) { again = false; refresh(); }
  }

  const heard = (what) => {
    if (what !== "tick") { if (offline) offline.hidden = what === "open"; }
    else if (!document.hidden) refresh();
  };
  const listen = (tell) => new Promise((over) => {
    const events = new EventSource("/events");
    for (const what of ["tick", "open", "error"]) {
      events.addEventListener(what, () => { tell(what); if (events.readyState === EventSource.CLOSED) over(); });
    }
  });

  // A browser makes six connections to a server, for all tabs together: one tab listens, and tells the others.
  if (document.querySelector("main [data-live], main[data-waits]") && !document.querySelector("main[data-past]")) {
    const others = new BroadcastChannel("penstock");
    others.addEventListener("message", (event) => heard(event.data));
    const tell = (what) => { heard(what); others.postMessage(what); };
    const turn = async () => {
      await (navigator.locks ? navigator.locks.request("penstock", () => listen(tell)) : listen(tell));
      setTimeout(turn, 5000);
    };
    turn();
    document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  }

  const at = document.getElementById("at");
  if (at) {
    at.addEventListener("input", () => { at.nextElementSibling.value = new Date(at.value * 1000).toISOString().slice(0, 19).replace("T", " "); });
    at.addEventListener("change", () => at.form.requestSubmit());
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
    });
  }

  // A range is chosen by drawing over the bars of a histogram.
  for (const picture of document.querySelectorAll("[data-brush]")) {
    const bars = [...picture.querySelectorAll("rect")];
    let from = null, to = null;
    const at = (event) => bars.findIndex((bar) => {
      const box = bar.getBoundingClientRect();
      return event.clientX >= box.left && event.clientX <= box.right + 1;
    });
    const mark = () => bars.forEach((bar, place) =>
      bar.classList.toggle("chosen", from !== null && place >= Math.min(from, to) && place <= Math.max(from, to)));
    picture.addEventListener("pointerdown", (event) => { const place = at(event); if (place >= 0) { from = to = place; mark(); } });
    picture.addEventListener("pointermove", (event) => { const place = at(event); if (from !== null && place >= 0) { to = place; mark(); } });
    picture.addEventListener("dragstart", (event) => event.preventDefault());
    picture.addEventListener("click", (event) => { if (from !== null && from !== to) event.preventDefault(); }, true);
    window.addEventListener("pointerup", () => {
      if (from === null) return;
      const [first, last] = [Math.min(from, to), Math.max(from, to)];
      if (first !== last) location.href = `${picture.dataset.brush}?first=${bars[first].dataset.first}&last=${bars[last].dataset.last}`;
      else { from = to = null; mark(); }
    });
  }
})();
