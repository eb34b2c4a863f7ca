// Moves a threshold over held-out rows: counts, rates and cost at each. Works from the disk, without a network.
(function () {
  const data = JSON.parse(document.getElementById("operating").textContent);
  const byId = (id) => document.getElementById(id);
  const cut = byId("cut"), miss = byId("miss"), alarm = byId("alarm"), shown = byId("operating-shown");
  const last = data.thresholds.length - 1;
  const cost = (i) => (data.positives - data.tp[i]) * Number(miss.value) + data.fp[i] * Number(alarm.value);
  const percent = (part, whole) => (whole ? (100 * part / whole).toFixed(1) + " %" : "–");
  const rounded = (x) => (Number.isInteger(x) ? x : Number(x.toPrecision(6))).toLocaleString("en");
  function show() {
    const i = Number(cut.value), tp = data.tp[i], fp = data.fp[i], flagged = tp + fp;
    const f1 = 2 * tp / (flagged + data.positives || 1);
    shown.textContent = "From probability " + data.thresholds[i].toPrecision(3) + ": catches " + rounded(tp) + " of " +
      rounded(data.positives) + " (recall " + percent(tp, data.positives) + ") with " + rounded(fp) +
      " false alarms (precision " + percent(tp, flagged) + "); flags " + percent(flagged, data.positives + data.negatives) +
      " of the rows; F1 " + f1.toFixed(3) + "; cost " + rounded(cost(i)) + ".";
    cut.setAttribute("aria-valuetext", "threshold " + data.thresholds[i].toPrecision(3));
  }
  function go(i) { cut.value = i; show(); }
  function cheapest() {
    let best = 0;
    for (let i = 1; i <= last; i++) if (cost(i) < cost(best)) best = i;
    return best;
  }
  cut.max = last;
  cut.addEventListener("input", show);
  miss.addEventListener("input", show);
  alarm.addEventListener("input", show);
  byId("to-chosen").addEventListener("click", () => go(data.chosen));
  byId("to-cheapest").addEventListener("click", () => go(cheapest()));
  byId("explore").hidden = false;
  go(data.chosen);
})();
