"use strict";
// Each column holds the text of one model: the tokens of the prompt, then the written ones, one
// <span> each. Everything comes from this server.

const $ = id => document.getElementById(id);
const SLIDERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"];
const settings = {};   // what is sent with a prompt
const columns = [];
let levels = [];       // surprise in nats at which the next colour begins
let timer = 0;         // of the popover

const percent = p => p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toPrecision(2)} %`;

function quoted(text) {
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣")}”`;
}

// ---------------------------------------------------------------- the server

async function ask(path, options) {
  const response = await fetch(path, options);
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error ?? `the server answers ${response.status}`);
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

function complain(error) {
  const lost = error instanceof TypeError;
  $("error").textContent = lost ? "the server does not answer: is it still running?" : error.message;
}

// ---------------------------------------------------------------- settings

function setUpSlider(key, value) {
  const input = $(key);
  const output = input.previousElementSibling;
  input.max = Math.max(input.max, value);
  input.min = Math.min(input.min, value);
  input.value = value;
  const read = () => {
    const all = key === "top_k" && input.value === input.max;
    output.textContent = all ? "all" : Number(input.value);
    input.setAttribute("aria-valuetext", output.textContent);
    return all ? null : Number(input.value);
  };
  read();
  input.addEventListener("input", () => { settings[key] = read(); });
}

function setUp(facts) {
  Object.assign(settings, facts.settings);
  const vocabulary = Math.max(...facts.models.map(model => model.vocabulary));
  const most = Math.min(vocabulary, Math.max(200, settings.top_k ?? 0));
  $("top_k").max = most + 1;  // one more: all tokens
  $("max_new_tokens").max = facts.most;
  const start = { ...settings };
  start.top_k = settings.top_k && settings.top_k <= most ? settings.top_k : most + 1;
  start.top_p ??= 1;
  start.min_p ??= 0;
  for (const key of SLIDERS) setUpSlider(key, start[key]);

  $("seed").value = settings.seed;
  $("stop").value = settings.stop;
  $("seed").addEventListener("input", () => { settings.seed = $("seed").valueAsNumber; });
  $("stop").addEventListener("input", () => { settings.stop = $("stop").value; });
  $("prompt").value = facts.prompt;
  levels = facts.levels;
  showLegend();
  facts.models.forEach(addColumn);
}

function showLegend() {
  const texts = levels.map((limit, i) => i === 0 ? `below ${limit}` : `${levels[i - 1]}–${limit}`);
  texts.push(`${levels.at(-1)} or more`);
  const boxes = texts.map((text, i) => {
    const box = document.createElement("span");
    box.className = `s${i}`;
    box.textContent = text;
    return box;
  });
  $("legend").replaceChildren("surprise in nats:", ...boxes);
}

// ---------------------------------------------------------------- columns

function addColumn(model, number) {
  const box = $("column").content.cloneNode(true).firstElementChild;
  const text = box.querySelector(".text");
  const column = { model, number, box, text, tokens: [], prompt: "", controller: null };
  box.querySelector("h2").textContent = model.name;
  text.setAttribute("aria-label", `Text of ${model.name}, token by token`);
  text.addEventListener("pointerover", event => {
    const at = event.target.dataset.at;
    if (at !== undefined) later(() => showAlternatives(column, Number(at)), 60);
  });
  text.addEventListener("pointerleave", leave);
  columns.push(column);
  $("columns").append(box);
}

function addToken(column, token) {
  token.span = document.createElement("span");
  token.span.dataset.at = column.tokens.length;
  column.tokens.push(token);
  draw(token);
  column.text.append(token.span);
}

function draw({ span, text, surprise }) {
  const isPrompt = surprise === undefined;
  span.className = isPrompt ? "prompt" : `s${levels.filter(limit => surprise >= limit).length}`;
  span.classList.toggle("newline", text.startsWith("\n"));
  span.classList.toggle("part", text === "");  // a part of the character that follows
  span.textContent = text.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, "�");
}

function redraw(column, tokens) {
  hide();
  column.text.replaceChildren();
  column.tokens = [];
  for (const token of tokens) addToken(column, token);
}

function summarise(column, speed) {
  const written = column.tokens.filter(token => token.surprise !== undefined);
  if (!written.length) return;
  const mean = written.reduce((sum, token) => sum + token.surprise, 0) / written.length;
  column.box.querySelector(".facts").textContent =
    `${written.length} tokens · ${mean.toFixed(2)} nats per token · ${speed.toFixed(0)} tokens/s`;
}

// ---------------------------------------------------------------- writing

// Write on after the prompt and the tokens `kept`, which this model has written before.
async function write(column, kept = []) {
  column.controller?.abort();
  const controller = column.controller = new AbortController();
  showStatus();
  try {
    const ids = kept.map(token => token.id);
    const data = { ...settings, model: column.number, prompt: column.prompt, kept: ids };
    const response = await ask("write", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(data),
      signal: controller.signal,
    });
    await showText(column, kept, lines(response), controller.signal);
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  }
  if (column.controller === controller) column.controller = null;
  showStatus();
}

// Show the tokens of a text as the server sends them.
async function showText(column, kept, answer, signal) {
  let began = 0;
  let count = 0;
  for await (const line of answer) {
    if (signal.aborted) return;
    if (line.error) throw new Error(line.error);
    if (line.tokens) {
      const first = line.tokens.length - line.kept;
      const facts = (id, i) => ({ id, text: line.texts[i], label: line.labels[i] });
      redraw(column, line.tokens.map((id, i) => ({ ...kept[i - first], ...facts(id, i) })));
      began = performance.now();
    } else if (line.end) {
      const last = column.tokens.at(-1);
      last.text += line.rest;
      draw(last);
    } else {
      addToken(column, line);
      count += 1;
      summarise(column, 1000 * count / (performance.now() - began));
    }
  }
}

function showStatus() {
  const writing = columns.some(column => column.controller);
  $("stop-writing").disabled = !writing;
  const failed = $("error").textContent;
  $("status").textContent = writing ? "writing …" : failed ? "" : "done";
}

function writeAll() {
  $("error").textContent = "";
  for (const column of columns) {
    column.prompt = $("prompt").value;
    write(column);
  }
}

// The text goes on with another token in place of the one at `at`.
function goOn(column, at, [id, label, p]) {
  hide();
  $("error").textContent = "";
  const before = column.tokens.slice(0, at).filter(token => token.top);
  const chosen = { id, label, text: label, surprise: -Math.log(p), top: column.tokens[at].top };
  write(column, [...before, chosen]);
}

// ---------------------------------------------------------------- the token under the pointer

function later(action, wait) {
  clearTimeout(timer);
  timer = setTimeout(action, wait);
}

function leave(event) {
  if (event.pointerType !== "touch") later(hide, 300);  // a finger leaves with every tap
}

function hide() {
  clearTimeout(timer);
  $("popover").hidden = true;
  document.querySelector(".active")?.classList.remove("active");
}

function showAlternatives(column, at) {
  hide();
  const token = column.tokens[at];
  if (token?.surprise === undefined) return;  // a token of the prompt
  token.span.classList.add("active");
  const p = Math.exp(-token.surprise);
  $("popover-title").textContent = quoted(token.text || token.label);
  $("popover-facts").textContent =
    `${percent(p)} likely at temperature 1, surprise ${token.surprise.toFixed(2)} nats`;
  const isAmong = token.top.some(([id]) => id === token.id);
  const shown = isAmong ? token.top : [...token.top, [token.id, token.label, p]];
  const items = shown.map(alternative => makeItem(column, at, alternative));
  $("alternatives").replaceChildren(...items);
  $("popover").hidden = false;
  place(token.span);
}

function makeItem(column, at, alternative) {
  const [id, label, p] = alternative;
  const item = document.createElement("li");
  const button = document.createElement("button");
  const name = document.createElement("span");
  name.className = "label";
  name.textContent = quoted(label);
  button.type = "button";
  button.title = "write on from here";
  button.classList.toggle("drawn", id === column.tokens[at].id);
  button.style.setProperty("--share", `${100 * p}%`);
  button.append(name, percent(p));
  button.addEventListener("click", () => goOn(column, at, alternative));
  item.append(button);
  return item;
}

// Below the token, touching it, so that the pointer can move in; above it where there is no room.
function place(span) {
  const box = [...span.getClientRects()].at(-1) ?? span.getBoundingClientRect();
  const popover = $("popover");
  const right = document.documentElement.clientWidth - popover.offsetWidth - 8;
  const height = popover.offsetHeight;
  const below = box.bottom + height < innerHeight || box.top < height;
  const top = below ? Math.min(box.bottom, innerHeight - height - 4) : box.top - height;
  popover.style.left = `${Math.max(8, Math.min(box.left, right))}px`;
  popover.style.top = `${Math.max(4, top)}px`;
}

// ---------------------------------------------------------------- start

$("controls").addEventListener("submit", event => {
  event.preventDefault();
  writeAll();
});
$("prompt").addEventListener("keydown", event => {
  const asks = event.key === "Enter" && (event.ctrlKey || event.metaKey);
  if (asks) $("controls").requestSubmit();
});
$("stop-writing").addEventListener("click", () => {
  for (const column of columns) column.controller?.abort();
});
$("popover").addEventListener("pointerenter", () => clearTimeout(timer));
$("popover").addEventListener("pointerleave", leave);
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", event => { if (event.key === "Escape") hide(); });
ask("models").then(response => response.json()).then(setUp).catch(complain);
