// The frame of all pages: growth, keys of lists, times, curves.
"use strict";
(() => {
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Growth. A browser has six connections to a host, and each open page would keep one: hidden pages let go of theirs.
  let source = null, missed = false;
  function listen() {
    if (document.hidden) { source?.close(); source = null; missed = true; return; }
    if (source) return;
    if (missed) document.body.dispatchEvent(new Event("grown"));
    source = new EventSource("/events");
    source.addEventListener("grown", (event) => {
      const left = Number(event.data);
      one("#standing").textContent = left ? `${(left / 1e6).toFixed(1)} MB left to index` : "";
      document.body.dispatchEvent(new Event("grown"));
    });
  }
  document.addEventListener("visibilitychange", listen);
  listen();

  // Times, as their reader's clock has them.
  function times() {
    for (const each of all("time[data-at]")) {
      const at = new Date(1000 * each.dataset.at), today = new Date().toDateString() === at.toDateString();
      each.dateTime = at.toISOString();
      each.textContent = today ? at.toLocaleTimeString([], { timeStyle: "short" }) : at.toLocaleString([], { dateStyle: "short", timeStyle: "short" });
    }
  }

  // Lists: j and k move, Enter opens, n and p turn pages, / searches.
  let current = "";
  const rows = () => all("#list tr[data-open], #more tr[data-open]"), shown = () => rows().filter((row) => !row.hidden);
  function mark(row, scroll) {
    all("tr.current").forEach((each) => each.classList.remove("current"));
    if (!row) return;
    current = row.id;
    row.classList.add("current");
    if (scroll) row.scrollIntoView({ block: "nearest" });
  }
  function walk(step) {
    const list = shown(), at = list.findIndex((row) => row.id === current);
    mark(list[at < 0 ? 0 : Math.min(list.length - 1, Math.max(0, at + step))], true);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const search = one("#filter input[type=search]");
    if (event.key === "/") search ? (search.focus(), search.select()) : (location.href = "/rollouts#search");
    else if (!one("#list")) return;
    else if (event.key === "x" && current) document.getElementById(current)?.querySelector("input[type=checkbox]")?.click();
    else if (event.key === "c" && one("#compare button")) one("#compare button").click();
    else if (event.key === "j" || event.key === "k") walk(event.key === "j" ? 1 : -1);
    else if (event.key === "Enter" && !event.target.closest("a, button")) location.href = document.getElementById(current)?.dataset.open ?? location.href;
    else if (event.key === "n" || event.key === "p") one(`:is(#list, #more) a[rel=${event.key === "n" ? "next" : "prev"}]`)?.click();
    else return;
    event.preventDefault();
  });
  document.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-open]");
    if (row && !event.target.closest("a, input, label") && !String(getSelection())) location.href = row.dataset.open;
  });
  if (location.hash === "#search") one("#filter input[type=search]")?.focus();

  document.addEventListener("change", (event) => { if (event.target.matches("[data-submits]")) event.target.form.submit(); });

  // Runs by the words of their rows.
  function find() {
    const words = (one("#find")?.value ?? "").toLowerCase().split(/\s+/);
    for (const row of rows()) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  }
  one("#find")?.addEventListener("input", find);
  one("#find")?.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });

  // Notes: sent as they are changed, one after the other; also when the page is left right after.
  const note = one("#note"), star = one("#note .star");
  let sending = Promise.resolve();
  function send() {
    const tags = note.elements.tags.value.split(/[\s,]+/).filter(Boolean);
    if (star.ariaPressed === "true") tags.push("starred");
    const body = JSON.stringify({ tags, note: note.elements.note.value });
    sending = sending.then(async () => {
      const answer = await fetch(note.dataset.post, { method: "POST", headers: { "Content-Type": "application/json" }, body, keepalive: true }).catch(() => null);
      one("output", note).textContent = answer?.ok ? "saved" : `not saved: ${answer ? (answer.status < 404 ? await answer.text() : answer.status) : "the viewer does not answer"}`;
    });
  }
  star?.addEventListener("click", () => { star.ariaPressed = star.ariaPressed === "true" ? "false" : "true"; send(); });
  note?.addEventListener("change", send);
  note?.addEventListener("submit", (event) => event.preventDefault());

  // A run that is gone: its last figures stay, and the page says so.
  document.addEventListener("htmx:responseError", (event) => { one("#standing").textContent = `this page cannot be loaded again: ${event.detail.xhr.status}`; });

  // What is reloaded keeps the marked row and the chosen runs.
  let chosen = [];
  document.addEventListener("htmx:beforeSwap", () => { chosen = all("#list input:checked").map((each) => each.value); });
  document.addEventListener("htmx:afterSettle", () => {
    for (const box of all("#list input[type=checkbox]")) box.checked = chosen.includes(box.value);
    if (current) mark(document.getElementById(current), false);
    if (one("#find")) find();
    times();
    choose();
  });
  times();

  function choose() {
    const button = one("#compare button");
    if (button) button.disabled = all("#list input:checked").length < 2;
  }
  one("#compare")?.addEventListener("change", choose);
  choose();

  // Curves.
  const holder = one("#curves");
  if (!holder) return;
  const colours = ["#12897f", "#d2762b", "#2f9d5f", "#b5485f", "#8060c0", "#a08a1c", "#30a0a0", "#c060a0", "#707c8c", "#6a8f2a", "#4a60c8", "#b04a2a"];
  const kinds = { done: "--accent", cut: "--idle", broke: "--warn" };
  const plots = new Map();
  // A run has one colour in all plots, also in those of what other runs lack; then labels are told apart by their dashes.
  const runs = new URL(holder.dataset.curves, location).searchParams.getAll("runs"), dashes = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 5], [4, 2]];
  // Counts with all their digits. uPlot's own texts have three decimals, and 300 digits where a number has them.
  const short = (value) => Math.abs(value) < 1e9 ? (Number.isInteger(value) ? value : +value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 20 }) : value.toExponential(2);
  const whole = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)); // there is no group 1.5
  // A canvas takes colours, not the name of a token.
  const tone = (token) => { holder.style.color = `var(${token})`; const found = getComputedStyle(holder).color; holder.style.color = ""; return found; };
  // The axis fits what is drawn, with room above and below; shares stay between 0 and 1, and what has no negative value above 0.
  function fitted(chart, least, most) {
    if (least == null || (least === 0 && most === 0)) return [0, 1];
    const room = (most - least || Math.abs(most) || 1) * 0.08;
    return [least >= 0 ? Math.max(0, least - room) : least - room, chart.share ? Math.min(1.02, most + room) : most + room];
  }
  const name = (line) => [runs.length > 1 ? line.run : "", line.label].filter(Boolean).join(" · ");
  const shownTitle = (chart) => chart.title.replace(/^metric\//, "");
  function add(chart) {
    if (plots.has(chart.title)) return;
    const card = document.createElement("section");
    card.className = "card";
    const title = Object.assign(document.createElement("h2"), { textContent: shownTitle(chart), className: chart.title.includes("/") ? "" : "words" }); // names of metrics stay as they are
    if (title.textContent !== chart.title) title.append(Object.assign(document.createElement("span"), { textContent: " metric", className: "own" })); // it may be called as another chart is
    card.append(title);
    holder.append(card);
    plots.set(chart.title, card);
  }
  function draw(chart) {
    const card = plots.get(chart.title);
    const ink = tone("--dim"), grid = tone("--line");
    const series = [{ label: { groups: "group", time: "time", step: "step" }[chart.over] }], bands = [], tables = [], ends = new Set();
    const labels = [...new Set(chart.lines.map((line) => line.label))];
    chart.lines.forEach((line) => {
      // An outcome of a single run has the colour that it has in bars; those of one colour are told apart by their dashes.
      const kind = runs.length > 1 ? null : kinds[line.kind], alike = kind ? chart.lines.filter((each) => each.kind === line.kind).indexOf(line) : 0;
      const place = labels.indexOf(line.label), stroke = kind ? tone(kind) : colours[(runs.length > 1 ? runs.indexOf(line.run) : place) % colours.length];
      const dash = runs.length > 1 ? dashes[place % dashes.length] : dashes[alike % dashes.length], label = (name(line) || shownTitle(chart)).slice(0, 60), table = [line.x, line.y];
      series.push({ label, stroke, dash, width: 2, points: { show: line.x.length < 40, size: 5 }, value: (_, value) => value == null ? "–" : short(value) });
      if (line.low) {
        const first = series.length;
        // Where the bands of several runs lie over each other, their edges tell them apart.
        for (const end of [line.high, line.low]) { table.push(end); ends.add(series.length); series.push({ stroke: chart.lines.length > 1 ? stroke + "99" : "transparent", dash, points: { show: false } }); }
        bands.push({ series: [first, first + 1], fill: stroke + (chart.lines.length > 1 ? "1c" : "33") });
      }
      tables.push(table);
    });
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    card.plot?.destroy();
    card.plot = null;
    card.querySelector("p")?.remove();
    // A point is no curve: its figures say more, and its interval would have no width. Nor is what never changes.
    const values = (line) => new Set(line.y.filter((value) => value != null));
    const flat = chart.lines.every((line) => values(line).size < 2);
    card.classList.toggle("flat", flat);
    if (flat) {
      const ends = (line) => line.x.length > 1 || line.low?.[0] == null ? "" : ` [${short(line.low[0])}, ${short(line.high[0])}]`;
      const said = chart.lines.map((line) => `${name(line)} ${[...values(line)].map(short)[0] ?? "–"}${ends(line)}`.trim());
      card.append(Object.assign(document.createElement("p"), { textContent: said.join("; ") + (chart.lines.some((line) => line.x.length > 1) ? " throughout" : "") }));
      return;
    }
    card.classList.toggle("alone-line", chart.lines.length === 1 && !name(chart.lines[0]));  // its title says what it is
    card.plot = new uPlot({
      width: Math.max(200, card.clientWidth - 30), height: 210, series, bands, axes: [chart.over === "time" ? axis : { ...axis, incrs: whole }, { ...axis, size: 64, values: (_, values) => values.map(short) }],
      scales: { x: { time: chart.over === "time" }, y: { range: (_, least, most) => fitted(chart, least, most) } }, cursor: { drag: { x: true, y: false } },
      legend: { live: true, show: true, markers: { dash: (_, at) => ["solid", "dashed", "dotted"][!series[at].dash?.length ? 0 : series[at].dash[0] > 2 ? 1 : 2] } },
    }, tables.length > 1 ? uPlot.join(tables) : tables[0], card);
    // The ends of intervals are lines for uPlot, and need no place in the legend.
    all(".u-series", card).forEach((row, at) => { row.hidden = ends.has(at); });
  }
  let latest = [], asked = 0;
  async function load() {
    const number = ++asked, over = holder.dataset.over;
    for (const button of all("#over button")) button.setAttribute("aria-pressed", button.dataset.over === over);
    const answer = await fetch(`${holder.dataset.curves}&over=${over}`);
    if (!answer.ok || number !== asked) return;
    latest = await answer.json();
    const titles = new Set(latest.map((chart) => chart.title));
    for (const [title, card] of plots) if (!titles.has(title)) { card.plot?.destroy(); card.remove(); plots.delete(title); }
    latest.forEach(add);
    latest.forEach(draw);
    holder.dataset.drawn = latest.length;
  }
  document.addEventListener("click", (event) => {
    const over = event.target.closest("button[data-over]")?.dataset.over;
    if (!over) return;
    holder.dataset.over = over;
    const address = new URL(location);
    address.searchParams.set("over", over);
    history.replaceState(null, "", address);
    load();
  });
  document.body.addEventListener("grown", load);
  const redraw = () => latest.forEach(draw);
  holder.closest("details")?.addEventListener("toggle", redraw); // while it is closed, nothing has a width
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); if (innerWidth !== width) waiting = setTimeout(() => { width = innerWidth; redraw(); }, 150); });
  load();
})();
