/* What `python -m llmk.estimate` computes, in the browser: llmk/estimate/__init__.py has the formula, and
   figures.json, which the page holds, what was measured. A test holds the two results equal. */
"use strict";

const PARTS = ["logits", "norms", "rotation", "gated units", "experts", "checkpoints"];
const GIB = 2 ** 30;

function first(config, names, otherwise) {
  for (const name of names) if (config[name] !== undefined && config[name] !== null) return config[name];
  if (otherwise === undefined) throw new Error(names.join(" or ") + ": the configuration has none");
  return otherwise;
}

function count(config, names, otherwise) {
  const found = first(config, names, otherwise);
  if (!Number.isInteger(found)) throw new Error(`${names.join(" or ")}: expected a whole number, got ${JSON.stringify(found)}`);
  return found;
}

function sizesOf(figures, given) {
  const config = { ...given, ...(given.text_config || {}) }, kinds = figures.model_types;
  const kind = config.model_type || "";
  for (const name of kinds.unknown_keys) {
    if (config[name]) throw new Error(`${name}: the estimate does not know the layers of such a model, ${kind || "of no type"}`);
  }
  const layers = config.layer_types || [];
  if (layers.some((layer) => !layer.includes("attention") || layer.includes("linear"))) {
    throw new Error("layer_types: expected attention alone, got " + layers.join(", "));
  }
  const experts = count(config, ["num_experts", "num_local_experts"], 0);
  const heads = count(config, ["num_attention_heads"]), hidden = count(config, ["hidden_size"]);
  return {
    hidden: hidden,
    layers: count(config, ["num_hidden_layers"]),
    heads: heads,
    kv_heads: count(config, ["num_key_value_heads"], heads),
    head_dim: count(config, ["head_dim"], Math.floor(hidden / Math.max(1, heads))),
    vocabulary: count(config, ["vocab_size"]),
    intermediate: experts ? 0 : count(config, ["intermediate_size"]),
    norms: kinds.norms[kind] || 2,
    qk_norm: kinds.qk_norm.includes(kind),
    offset_norms: kinds.offset_norms.includes(kind),
    softcap: Boolean(config.final_logit_softcapping),
    gelu: first(config, ["hidden_activation", "hidden_act"], "silu").includes("gelu"),
    tied: Boolean(given.tie_word_embeddings ?? config.tie_word_embeddings ?? true),
    experts: experts,
    experts_per_token: experts ? count(config, ["num_experts_per_tok"]) : 0,
    expert_intermediate: experts ? count(config, ["moe_intermediate_size", "intermediate_size"]) : 0,
  };
}

function parameters(s) {
  const heads = 2 * s.head_dim * (s.heads + s.kv_heads);
  const layer = s.hidden * (heads + 3 * s.intermediate + 3 * s.experts * s.expert_intermediate);
  return (s.tied ? 1 : 2) * s.vocabulary * s.hidden + s.layers * layer;
}

function at(points, size) {
  if (!points || !points.length) return null;
  for (let i = 0; i + 1 < points.length; i++) {
    const [low, before] = points[i], [high, after] = points[i + 1];
    if (low <= size && size <= high) return before + ((after - before) * Math.log(size / low)) / Math.log(high / low);
  }
  return size < points[0][0] ? points[0][1] : points[points.length - 1][1];
}

const ms = (count, ns) => (ns === null ? null : count * ns * 1e-6);
const rateMs = (count, perSecond) => (perSecond === null ? null : (1e3 * count) / perSecond);
const sum = (terms) => (terms.includes(null) ? null : terms.reduce((total, term) => total + term, 0));

function logits(figures, s, T, way, count) {
  const H = s.hidden, V = s.vocabulary;
  if (!way.startsWith("llmk")) return T * V * (count.logit + (s.softcap ? count.softcap : 0));
  const rows = Math.min(T, at(figures.chunk_rows, V) || T);
  const sums = T <= figures.rounded_chunks * rows ? 2 : 4;
  return sums * V * H + 2 * T * H + 2 * rows * V;
}

function bytesOf(figures, s, T, way, checkpointing) {
  const count = {};
  for (const name in figures.bytes) count[name] = figures.bytes[name][figures.ways.indexOf(way)];
  const L = checkpointing ? 1 : s.layers, H = s.hidden, TL = T * L, qk = (s.heads + s.kv_heads) * s.head_dim;
  const norm = count[s.offset_norms ? "offset norm" : "norm"];
  const norms = T * (L * s.norms + 1) * H * norm + TL * H * 2 * count["norm's output"];
  const ofExpert = H * count["expert's hidden"] + s.expert_intermediate * count["expert's width"];
  return {
    logits: logits(figures, s, T, way, count),
    norms: norms + (s.qk_norm ? TL * qk * count["norm of q and k"] : 0),
    rotation: 2 * TL * qk,
    "gated units": TL * s.intermediate * count["gated unit"],
    experts: TL * s.experts_per_token * ofExpert,
    checkpoints: checkpointing ? 2 * T * s.layers * H : 0,
    rest: 6 * parameters(s) + 2 * TL * qk,
  };
}

function peakOf(s, bytes, checkpointing) {
  const weights = 6 * parameters(s), projection = 2 * s.vocabulary * s.hidden;
  const layers = sum(Object.values(bytes)) - bytes.logits - bytes.checkpoints - weights;
  const [kept, again] = checkpointing ? [bytes.checkpoints, layers] : [layers, 0];
  return Math.max(weights + kept + bytes.logits, weights + kept + projection + again, 8 * parameters(s) + again);
}

function partsOf(figures, s, T, S, way, measured, checkpointing) {
  const column = figures.ways.indexOf(way), ns = {};
  for (const name in measured.ns) ns[name] = measured.ns[name][column];
  const H = s.hidden, V = s.vocabulary, Q = s.heads * s.head_dim;
  const TL = T * s.layers, qk = Q + s.kv_heads * s.head_dim, picks = TL * s.experts_per_token;
  const linear = 6 * TL * (2 * H * qk + 3 * H * s.intermediate), attention = 7 * TL * S * Q;
  const ofEach = s.experts ? at(ns.experts, (T * s.experts_per_token) / s.experts) : 0;
  const layers = sum([rateMs(linear, measured.products), rateMs(attention, at(measured.attention, s.head_dim))]);
  const bytes = bytesOf(figures, s, T, way, checkpointing);
  const time = {
    logits: sum([rateMs(6 * T * H * V, measured.products), ms(T * V, at(ns.logits, V))]),
    norms: sum([ms(2 * TL * H, at(ns["norm with residual"], H)), ms((s.norms - 2) * TL * H, at(ns.norm, H))]),
    rotation: ms(TL * qk, at(ns[s.qk_norm ? "rotation with norms" : "rotation"], s.head_dim)),
    "gated units": ms(TL * s.intermediate, at(ns[s.gelu ? "geglu" : "swiglu"], s.intermediate)),
    experts: s.experts ? ms(picks * H * s.expert_intermediate, ofEach) : 0,
    rest: sum([layers, rateMs(14 * parameters(s), measured.copy)]),
  };
  const again = sum([time.norms, time.rotation, time["gated units"], time.experts, layers]);
  time.checkpoints = checkpointing ? again && again / 3 : 0;
  const parts = {};
  for (const name in bytes) parts[name] = { gib: bytes[name] / GIB, ms: time[name] };
  const step = { gib: peakOf(s, bytes, checkpointing) / GIB, ms: sum(Object.values(parts).map((part) => part.ms)) };
  return { ...parts, step: step };
}

function estimate(figures, sizes, tokens, sequence, gpu, checkpointing) {
  const found = {}, measured = figures.gpus[gpu];
  for (const way of figures.ways) found[way] = partsOf(figures, sizes, tokens, sequence, way, measured, checkpointing);
  return found;
}

/* The form. */

function table(figures, found) {
  const shown = [...PARTS, "rest", "step"].filter(
    (part) => part === "step" || figures.ways.some((way) => found[way][part].gib)
  );
  const titles = { rest: "the rest", step: "step, in all" };
  const cell = (value, digits) => (value === null ? "-" : value.toFixed(digits));
  const rows = shown.map((part) => {
    const cells = figures.ways.map((way) => `<td>${cell(found[way][part].gib, 2)}</td><td>${cell(found[way][part].ms, 1)}</td>`);
    return `<tr><th scope="row">${titles[part] || part}</th>${cells.join("")}</tr>`;
  });
  const ways = figures.ways.map((way) => `<th colspan="2" scope="colgroup">${way}</th>`).join("");
  const units = figures.ways.map(() => "<th>GiB</th><th>ms</th>").join("");
  return `<table><thead><tr><td></td>${ways}</tr><tr><td></td>${units}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

function start() {
  const figures = JSON.parse(document.getElementById("estimate-figures").textContent);
  const presets = JSON.parse(document.getElementById("estimate-models").textContent);
  const form = document.getElementById("estimate"), out = document.getElementById("estimate-result");
  const set = (sizes) => {
    for (const [name, value] of Object.entries(sizes)) {
      const field = form.elements[name];
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
    }
  };
  const read = () => {
    const sizes = {};
    for (const name in presets[Object.keys(presets)[0]]) {
      const field = form.elements[name];
      sizes[name] = field.type === "checkbox" ? field.checked : Number(field.value);
      const least = ["intermediate", "experts", "experts_per_token", "expert_intermediate"].includes(name) ? 0 : 1;
      if (field.type !== "checkbox" && !(Number.isInteger(sizes[name]) && sizes[name] >= least)) {
        throw new Error(`${name}: expected a whole number from ${least}`);
      }
    }
    return sizes;
  };
  const show = () => {
    try {
      const tokens = Number(form.elements.tokens.value), sequence = Number(form.elements.sequence.value);
      if (!(Number.isInteger(tokens) && tokens >= 1)) throw new Error("tokens: expected a whole number from 1");
      if (!(sequence >= 1 && sequence <= tokens)) throw new Error(`sequence: expected 1 to ${tokens}, the tokens`);
      const gpu = figures.gpus[form.elements.gpu.value];
      const checkpointing = form.elements.checkpointing.checked;
      const found = estimate(figures, read(), tokens, sequence, form.elements.gpu.value, checkpointing);
      const note = gpu.copy ? "" : " A dash was not measured there.";
      out.innerHTML = `<div class="scroll">${table(figures, found)}</div>
        <p>An estimate from tables of ${gpu.date}, one ${gpu.device}, torch ${gpu.torch}.${note}</p>`;
    } catch (error) {
      out.textContent = error.message;
    }
  };
  form.elements.preset.addEventListener("change", (event) => {
    if (event.target.value) set(presets[event.target.value]);
  });
  form.elements.config.addEventListener("input", (event) => {
    event.stopPropagation();
    if (!event.target.value.trim()) return;
    try {
      set(sizesOf(figures, JSON.parse(event.target.value)));
      show();
    } catch (error) {
      out.textContent = error.message;
    }
  });
  form.addEventListener("input", show);
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  set(presets[form.elements.preset.value]);
  show();
}

if (typeof module !== "undefined") module.exports = { estimate, sizesOf };
else start();
