// The pages of a rollout and of a group: keys, deep links, and the tokens of a sample.
"use strict";
(() => {
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // A button copies the command that it holds, or the address of the page; it shows it where the browser does not let it.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy], button[data-copy-link]");
    if (!button) return;
    const text = button.dataset.copy ?? location.href;
    try {
      await navigator.clipboard.writeText(text);
      const label = button.textContent;
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = label), 2000);
    } catch {
      button.replaceWith(make("code", "", text));
    }
  });

  // Keys: j and k walk the messages, n and p the rollouts, t toggles the tokens.
  let current = null;
  function walk(step) {
    const messages = all("[data-step]").filter((each) => each.offsetParent !== null);
    if (!messages.length) return;
    const at = messages.indexOf(current);
    const next = at < 0 ? (step > 0 ? 0 : messages.length - 1) : Math.min(messages.length - 1, Math.max(0, at + step));
    if (current) current.classList.remove("current");
    current = messages[next];
    current.classList.add("current");
    current.scrollIntoView({ block: "nearest" });
    current.focus({ preventScroll: true });
    if (current.id) history.replaceState(null, "", `#${current.id}`);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "j" || event.key === "k") walk(event.key === "j" ? 1 : -1);
    else if (event.key === "n" || event.key === "p") one(`a[rel=${event.key === "n" ? "next" : "prev"}]`)?.click();
    else if (event.key === "t" && view) location.hash = shownView() === "tokens" ? "conversation" : "tokens";
    else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && view?.selected != null && shownView() === "tokens")
      view.select(view.selected + (event.key === "ArrowRight" ? 1 : -1), true);
    else if (event.key === "Escape") view?.select(null);
    else return;
    event.preventDefault();
  });

  // Views: one part of the page at a time; the address says which.
  const parts = all("[data-view]");
  const shownView = () => parts.find((part) => !part.hidden)?.dataset.view;
  function show(name) {
    for (const part of parts) part.hidden = part.dataset.view !== name;
    for (const link of all("[data-shows]")) link.setAttribute("aria-current", String(link.dataset.shows === name));
  }
  function follow() {
    const hash = location.hash.slice(1);
    const token = hash.match(/^(?:sample-(\d+)\/)?token-(\d+)$/);
    const sample = hash.match(/^sample-(\d+)$/);
    const target = hash ? document.getElementById(hash) : null;
    if (view && (token || sample || hash === "tokens")) {
      show("tokens");
      const number = hash === "tokens" ? view.data?.index : (token || sample)[1];
      view.load(Number(number ?? 0), token ? Number(token[2]) : null);
      return;
    }
    const part = target?.closest("[data-view]") || parts[0];
    if (part) show(part.dataset.view);
    if (!target) return;
    for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    target.scrollIntoView({ block: "start" });
    if (target.matches("[data-step]")) {
      current?.classList.remove("current");
      (current = target).classList.add("current");
    }
  }
  window.addEventListener("hashchange", follow);

  // The next rollout shows its tokens in the same colour.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[rel], .siblings a");
    const colour = new URLSearchParams(location.search).get("colour");
    if (!view || !link) return;
    const address = new URL(link.href);
    if (colour) address.searchParams.set("colour", colour);
    else address.searchParams.delete("colour");
    link.href = address;
  });

  // Tokens.
  const STEPS = [0.99, 0.9, 0.75, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001];
  const PART = 150;
  const LONGEST = 600;
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/gu;

  function bucket(logprob) {
    const probability = Math.exp(logprob);
    const at = STEPS.findIndex((step) => probability >= step);
    return at < 0 ? STEPS.length : at;
  }
  const percent = (logprob) => {
    const value = 100 * Math.exp(logprob);
    return value >= 99.95 ? "100 %" : value >= 1 ? `${value.toFixed(1)} %` : `${value.toPrecision(2)} %`;
  };
  const signed = (value) => { // what rounds to 0 has no sign
    const text = Math.abs(value).toFixed(2);
    return (Number(text) ? (value > 0 ? "+" : "\u2212") : "") + text;
  };
  const visible = (text) =>
    text
      .replace(HIDDEN, (each) => `\\u{${each.codePointAt(0).toString(16)}}`)
      .replace(/\t/g, "⇥\t")
      .replace(/\n/g, "⏎\n")
      .replace(/^ +$/, (blanks) => "␣".repeat(blanks.length));

  class TokenView {
    constructor(box) {
      this.box = box;
      this.stage = one(".stage", box);
      this.card = one(".card-of-token", box);
      this.sky = one("canvas", box);
      this.data = this.selected = null;
      this.wanted = 0;
      box.addEventListener("pointerover", (event) => {
        const i = event.target.closest?.(".t")?.i;
        if (i !== undefined) this.describe(i);
        else if (this.selected === null) this.card.hidden = true;
        else this.describe(this.selected);
      });
      this.stage.addEventListener("click", (event) => {
        const i = event.target.closest?.(".t")?.i;
        if (i !== undefined) this.select(i);
      });
      for (const input of all("input[name=colour]", box)) {
        input.addEventListener("change", () => {
          const address = new URL(location);
          if (input.defaultChecked) address.searchParams.delete("colour");
          else address.searchParams.set("colour", input.value);
          history.replaceState(null, "", address);
          this.colour(input.value);
        });
        if (input.value === new URLSearchParams(location.search).get("colour")) input.checked = true;
      }
      for (const tab of all("[data-sample]", box)) {
        tab.addEventListener("click", () => (location.hash = `sample-${tab.dataset.sample}`));
      }
      this.sky.addEventListener("click", (event) => {
        const place = Math.floor((event.offsetX / this.sky.clientWidth) * this.data.ids.length);
        this.select(Math.min(this.data.ids.length - 1, place), true);
      });
      this.near = new IntersectionObserver((seen) => seen.forEach((each) => each.isIntersecting && this.fill(each.target)), {
        rootMargin: "1200px",
      });
      window.addEventListener("scroll", () => (this.marking ??= requestAnimationFrame(() => this.mark())), { passive: true });
      window.addEventListener("resize", () => this.data && this.skyline());
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.data && this.skyline());
    }

    async load(sample, token) {
      if (this.data?.index !== sample || this.loading) {
        const turn = ++this.wanted;
        this.loading = true;
        this.stage.replaceChildren(make("p", "dim", "loading…"));
        let data;
        try {
          const answer = await fetch(`${this.box.dataset.url}/${sample}`);
          if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
          data = await answer.json();
          if (turn !== this.wanted) return;
          this.draw(data);
        } catch (error) {
          if (turn === this.wanted) {
            this.loading = false;
            this.data = null;
            this.stage.replaceChildren(make("p", "bad", `The tokens cannot be read: ${error.message}`));
          }
          return;
        }
        this.loading = false;
      }
      if (token !== null) this.select(token, true);
    }

    draw(data) {
      this.data = data;
      this.elements = new Array(data.ids.length);
      this.select(null);
      const length = data.ids.length;
      this.special = new Set(data.special);
      this.whole = new Map();
      for (const [start, count, text] of data.runs) {
        for (let i = start; i < start + count; i++) this.whole.set(i, [start, count, text]);
      }
      this.version = new Array(length).fill(null);
      const names = [...new Set(data.versions.map(([name]) => name))];
      for (const [name, start, end] of data.versions) this.version.fill(name, start, end);
      this.versionNumber = new Map(names.map((name, number) => [name, number % 8]));
      this.segment = new Array(length);
      for (const each of data.segments) this.segment.fill(each, each.start, each.end);
      for (const tab of all("[data-sample]", this.box)) {
        tab.setAttribute("aria-current", String(Number(tab.dataset.sample) === data.index));
      }
      for (const [name, known] of [["version", names.length], ["choices", data.choices], ["advantage", data.advantage !== null]]) {
        const input = one(`input[value=${name}]`, this.box);
        input.disabled = !known;
        input.parentElement.title = known ? "" : "not recorded for this sample";
        if (!known && input.checked) one("input[value=logprob]", this.box).click();
      }
      const note = one(".note", this.box);
      note.hidden = Boolean(data.tokenizer) && !data.doubtful;
      note.textContent = data.doubtful
        ? `The tokens do not spell the messages with ${data.tokenizer}: it is another model's tokenizer. Start with --tokenizer PATH.`
        : "The run's tokenizer is not on this machine, so tokens are shown by their ids. Start with --tokenizer PATH " +
          "(a tokenizer.json, a folder with one, or a .gguf file) to see their texts.";
      const trained = data.logprobs.filter((each, i) => each !== null && this.segment[i].trained_in === data.index);
      const mean = trained.reduce((sum, each) => sum + each, 0) / trained.length;
      one(".figures-of-sample", this.box).textContent =
        `${length.toLocaleString("en")} tokens · ${data.trained.toLocaleString("en")} trained · mean logprob ${signed(mean)}` +
        ` · perplexity ${Math.exp(-mean).toFixed(2)} · weight ${data.weight.toFixed(2)}` +
        (data.staleness === null ? "" : ` · staleness ${data.staleness}`) +
        (data.skipped ? ` · not trained: ${data.skipped}` : "") +
        (data.discarded ? " · discarded attempt" : "") + (data.tokenizer ? ` · ${data.tokenizer}` : "");
      this.chunks = [];
      this.near.disconnect();
      this.stage.replaceChildren(...data.segments.map((segment) => this.drawSegment(segment)));
      this.chunks.forEach((chunk) => this.near.observe(chunk));
      this.colour(one("input[name=colour]:checked", this.box).value);
      this.fillRest(this.wanted);
      requestAnimationFrame(() => this.skyline());
    }

    drawSegment(segment) {
      const count = segment.end - segment.start;
      const box = make("section", `segment ${segment.kind}`);
      const head = make("header");
      if (segment.kind === "sampled") {
        const elsewhere = segment.trained_in !== this.data.index;
        const link = make("a", "", segment.purpose === "summary" ? `summary, turn ${segment.label}` : `turn ${segment.label}`);
        link.href = `#turn-${segment.turn}`;
        head.append(link);
        const facts = [`${count} sampled`, `mean ${signed(segment.mean_logprob)}`, `finish ${segment.finish_reason}`];
        if (segment.prompt_checked !== "none") facts.push(`prompt confirmed by ${segment.prompt_checked}`);
        if (segment.interrupts) facts.push(`${segment.interrupts} interrupts`);
        head.append(` ${facts.join(" · ")} `);
        if (elsewhere) {
          const other = make("a", "tag", `trained in sample ${segment.trained_in}`);
          other.href = `#sample-${segment.trained_in}/token-${segment.start}`;
          head.append(other);
          box.classList.add("elsewhere");
        } else if (this.data.discarded) head.append(make("span", "tag warn", "discarded attempt"));
      } else head.append(`${count.toLocaleString("en")} tokens ${segment.start ? "between" : "of the prompt, as sent"}`);
      const text = make("div", "text");
      for (let start = segment.start; start < segment.end; ) {
        let end = Math.min(start + PART, segment.end);
        while (end < segment.end && end - start < LONGEST && !(this.data.texts?.[end - 1] ?? "").endsWith("\n")) end++;
        const chunk = make("div", "chunk");
        chunk.from = start;
        chunk.to = end;
        chunk.style.containIntrinsicSize = `auto ${Math.max(1, Math.ceil((end - start) / 14)) * 25}px`;
        this.chunks.push(chunk);
        text.append(chunk);
        start = end;
      }
      if (segment.kind === "context" && !segment.start && count > 200) {
        const details = make("details");
        const summary = make("summary");
        summary.append(...head.childNodes);
        details.append(summary, text);
        box.append(details);
      } else box.append(head, text);
      return box;
    }

    fillRest(turn) {
      const idle = window.requestIdleCallback || ((call) => setTimeout(() => call({ timeRemaining: () => 8 }), 16));
      let at = 0;
      const step = (deadline) => {
        if (turn !== this.wanted) return;
        do this.fill(this.chunks[at++]); while (at < this.chunks.length && deadline.timeRemaining() > 4);
        if (at < this.chunks.length) idle(step);
      };
      if (this.chunks.length) idle(step);
    }

    fill(chunk) {
      if (chunk.firstChild) return;
      this.near.unobserve(chunk);
      const pieces = document.createDocumentFragment();
      let ruby = null;
      for (let i = chunk.from; i < chunk.to; i++) {
        const element = this.token(i);
        const whole = this.whole.get(i);
        if (whole && (whole[0] === i || i === chunk.from)) ruby = make("ruby");
        (whole ? ruby : pieces).append(element);
        if (whole && (whole[0] + whole[1] - 1 === i || i === chunk.to - 1)) {
          ruby.append(make("rt", "", visible(whole[2])));
          pieces.append(ruby);
        }
      }
      chunk.append(pieces);
    }

    token(i) {
      const { ids, texts, bytes, logprobs, index, advantage, choices } = this.data;
      const special = this.special.has(ids[i]);
      const part = texts && bytes[i] !== undefined;
      const element = make("span", "", texts ? (part ? bytes[i] || `⟨${ids[i]}⟩` : visible(texts[i])) : String(ids[i]));
      const kinds = ["t"];
      if (!texts) kinds.push("id");
      if (part) kinds.push("part");
      if (special) kinds.push("special");
      if (logprobs[i] === null) kinds.push("context");
      else {
        const own = this.segment[i].trained_in === index;
        kinds.push(`l${bucket(logprobs[i])}`, own ? (this.data.discarded ? "m2" : "m1") : "m0");
        if (this.version[i] !== null) kinds.push(`v${this.versionNumber.get(this.version[i])}`);
        if (own && advantage !== null) kinds.push(this.tone(this.segment[i].advantage ?? advantage));
        if (choices) kinds.push(`c${Math.min(9, Math.ceil(Math.log2(choices[i] || 1)))}`);
      }
      element.className = kinds.join(" ");
      element.i = i;
      this.elements[i] = element;
      return element;
    }

    advantages() {
      const own = this.data.segments.filter((each) => each.trained_in === this.data.index);
      return [...new Set(own.map((each) => each.advantage ?? this.data.advantage ?? 0))];
    }

    tone(advantage) {
      const largest = this.data.largest_advantage;
      return `a${advantage < 0 ? "n" : "p"}${largest ? Math.ceil((4 * Math.abs(advantage)) / largest - 1e-9) : 0}`;
    }

    colour(name) {
      this.stage.className = `stage by-${name}`;
      const legends = {
        logprob: STEPS.map((step, at) => [`l${at}`, `≥ ${100 * step} %`]).concat([["l9", "less"]]),
        training: [["m1", "trained here"], ["m0", "trained in another sample"], ["m2", "discarded attempt"]],
        advantage: this.data ? this.advantages().map((each) => [this.tone(each), `advantage ${signed(each)}`]) : [],
        version: this.data ? [...this.versionNumber].map(([version, number]) => [`v${number}`, version]) : [],
        choices: [1, 2, 4, 16, 64, 512].map((count) => [`c${Math.log2(count)}`, `${count} ids`]),
      };
      const swatches = legends[name].map(([kind, text]) => {
        const entry = make("span", "swatch");
        entry.append(make("i", `t ${kind}`), text);
        return entry;
      });
      const legend = one(".legend", this.box);
      legend.className = `legend by-${name}`;
      legend.replaceChildren(...swatches, make("span", "swatch dim", "grey: context"));
    }

    select(i, scroll = false) {
      if (this.selected !== null) this.elements[this.selected]?.classList.remove("selected");
      this.selected = null;
      this.card.hidden = true;
      if (i === null || !this.data || i < 0 || i >= this.data.ids.length) return;
      const chunk = this.chunks.find((each) => each.from <= i && i < each.to);
      this.fill(chunk);
      const details = chunk.closest("details");
      if (details) details.open = true;
      this.selected = i;
      const element = this.elements[i];
      element.classList.add("selected");
      if (scroll) {
        chunk.scrollIntoView({ block: "nearest" }); // it has its true height from here on
        element.scrollIntoView({ block: "center" });
      }
      history.replaceState(null, "", this.data.index ? `#sample-${this.data.index}/token-${i}` : `#token-${i}`);
      this.describe(i);
    }

    describe(i) {
      const { ids, texts, bytes, logprobs, index, advantage, choices, turn_rewards: turnRewards, trainer_logprobs: trainer } = this.data;
      const segment = this.segment[i];
      const whole = this.whole.get(i);
      const rows = [["id", ids[i] + (this.special.has(ids[i]) ? " · special" : "")], ["position", `${i} of ${ids.length}`]];
      if (bytes[i] !== undefined) rows.push(["bytes", bytes[i]]);
      if (whole) rows.push(["part of", `${JSON.stringify(whole[2])}, tokens ${whole[0]} to ${whole[0] + whole[1] - 1}`]);
      if (logprobs[i] === null) rows.push(["mask", "\u2212100: context, not trained"]);
      else {
        rows.push(["logprob", `${logprobs[i].toFixed(4)} · ${percent(logprobs[i])}`]);
        if (trainer?.[i] != null) {
          const ratio = Math.exp(trainer[i] - logprobs[i]);
          rows.push(["trainer", `${trainer[i].toFixed(4)} · ratio ${ratio.toFixed(3)}`]);
        }
        if (choices) rows.push(["choices", `${choices[i]} ids: entropy at most ${Math.log(choices[i] || 1).toFixed(2)} nats`]);
        const own = segment.trained_in === index;
        rows.push(["mask", own ? (this.data.skipped ? `not trained: ${this.data.skipped}` : `${ids[i]}: trained here`) : `\u2212100: trained in sample ${segment.trained_in}`]);
        rows.push(["turn", `${segment.label}, token ${i - segment.start + 1} of ${segment.end - segment.start}`]);
        if (own && advantage !== null) rows.push(["advantage", signed(segment.advantage ?? advantage)]);
        if (own && turnRewards?.[segment.turn] !== undefined) rows.push(["turn reward", signed(turnRewards[segment.turn])]);
        if (this.version[i] !== null) rows.push(["policy version", this.version[i]]);
      }
      const list = make("dl");
      for (const [name, value] of rows) list.append(make("dt", "", name), make("dd", "", value));
      const text = texts?.[i];
      this.card.replaceChildren(make("b", "", text == null ? `⟨${ids[i]}⟩` : JSON.stringify(text).replace(HIDDEN, "\ufffd")), list);
      this.card.hidden = false;
      const element = this.elements[i];
      if (!element) return;
      const place = element.getBoundingClientRect();
      const card = this.card.getBoundingClientRect();
      this.card.hidden = i === this.selected && (place.bottom < 0 || place.top > innerHeight);
      this.card.classList.toggle("up", place.bottom > innerHeight / 2);  // a phone's sheet is at the other end of the screen
      const below = place.bottom + 8 + card.height < innerHeight;
      this.card.style.left = `${Math.max(8, Math.min(place.left, document.documentElement.clientWidth - card.width - 8))}px`;
      this.card.style.top = `${below ? place.bottom + 8 : Math.max(8, place.top - card.height - 8)}px`;
    }

    // The whole sample in a strip: the taller a bar, the less likely its least likely token was.
    skyline() {
      const { ids, logprobs, index } = this.data;
      const scale = devicePixelRatio || 1;
      const width = this.sky.clientWidth;
      const height = this.sky.clientHeight;
      if (!width) return;
      this.sky.width = width * scale;
      this.sky.height = height * scale;
      const paint = this.sky.getContext("2d");
      paint.scale(scale, scale);
      const tone = (name) => getComputedStyle(one(`.tones .${name}`, this.box)).backgroundColor;
      const tones = Array.from({ length: 10 }, (_, at) => tone(`l${at}`));
      const [base, rest] = [tone("context"), tone("m0")];
      const bars = Math.min(ids.length, width);
      for (let bar = 0; bar < bars; bar++) {
        const from = Math.floor((bar * ids.length) / bars);
        const to = Math.max(from + 1, Math.floor(((bar + 1) * ids.length) / bars));
        let least = null;
        let own = false;
        for (let i = from; i < to; i++) {
          if (logprobs[i] === null) continue;
          least = least === null ? logprobs[i] : Math.min(least, logprobs[i]);
          own ||= this.segment[i].trained_in === index;
        }
        const tall = least === null ? 2 : 5 + (height - 6) * Math.min(1, -least / 9);
        paint.fillStyle = least === null ? base : own ? tones[Math.max(1, bucket(least))] : rest;
        paint.fillRect((bar * width) / bars, height - tall, Math.max(1, width / bars), tall);
      }
      this.mark();
    }

    mark() {
      this.marking = null;
      if (!this.data || this.box.hidden) return;
      if (this.selected !== null) this.describe(this.selected);
      const edge = (from, step) => {
        for (let at = from; this.chunks[at]; at += step) {
          const { top, bottom, height } = this.chunks[at].getBoundingClientRect();
          if (height && (step > 0 ? bottom > 0 : top < innerHeight)) {
            const share = Math.min(1, Math.max(0, ((step > 0 ? 0 : innerHeight) - top) / height));
            return this.chunks[at].from + share * (this.chunks[at].to - this.chunks[at].from);
          }
        }
        return 0;
      };
      const window_ = one(".window", this.box);
      const [low, high] = [edge(0, 1), edge(this.chunks.length - 1, -1)].map((i) => (100 * i) / this.data.ids.length);
      window_.style.left = `${low}%`;
      window_.style.width = `${Math.max(0, high - low)}%`;
    }
  }

  const box = one("#tokens");
  const view = box && box.dataset.url ? new TokenView(box) : null;
  follow();
})();
