"use strict";
const EXAMPLE = { preset: "llama-2-7b", node: "dgx_a100_640gb", count: 2, global_batch: 64, seq_len: 4096, precision: "bf16_mixed", time_limit: 20 };

let catalogue = { node_presets: [] };

function documents() {
  const model = $("model").value.trim() ? JSON.parse($("model").value) : $("preset").value;
  const own = $("cluster").value.trim();
  const count = Number($("count").value);
  const cluster = own ? JSON.parse(own) : { name: `${count} x ${$("node").value}`, nodes: [{ preset: $("node").value, count }] };
  const workload = { name: "from the page", global_batch: Number($("global_batch").value), seq_len: Number($("seq_len").value), precision: $("precision").value };
  return { model, cluster, workload };
}

function read(target) {
  try {
    const found = documents();
    if (!found.model) throw new Error("Paste a config.json or choose a known model.");
    return found;
  } catch (error) {
    showProblem(target, error instanceof SyntaxError ? new Error(`This is no JSON: ${error.message}`) : error);
    return null;
  }
}

async function ask(event) {
  event.preventDefault();
  $("problem").replaceChildren();
  const given = read($("problem"));
  if (!given) return;
  try {
    const job = await api("/v1/plans", { ...given, options: { time_limit_s: Number($("time_limit").value) } });
    location.href = `/plans/${job.id}`;
  } catch (error) {
    showProblem($("problem"), error);
  }
}

async function judge(event) {
  event.preventDefault();
  const target = $("judgement");
  const given = $("model").value.trim() || $("preset").value ? read(target) : { ...documents(), model: null };
  if (!given) return;
  target.replaceChildren(node("p", "Reading it", { class: "muted" }));
  try {
    showJudgement(target, await api("/v1/imports", { ...given, text: $("config").value, framework: $("framework").value, strategy: $("own").value.trim() || null }));
  } catch (error) {
    showProblem(target, error);
  }
}

function showJudgement(target, found) {
  const parts = [node("p")];
  parts[0].append("It asks for ", node("code", found.strategy));
  if (found.rules.length) {
    parts.push(node("p", "Forbidden here:", { class: "bad" }));
    const list = node("ul");
    for (const rule of found.rules) list.append(node("li", rule.message + (rule.nearest === null ? "" : `; nearest: ${rule.nearest}`)));
    parts.push(list);
  }
  if (found.prediction) {
    const memory = found.prediction.memory;
    const text = `${found.fits ? "It fits" : "It does not fit"}: ${bytes(memory.reserved_bytes ?? memory.peak_bytes)} of ${bytes(memory.capacity_bytes)} on the fullest device; a step takes ${seconds(found.prediction.step_time_s)}, ${Math.round(found.prediction.tokens_per_s).toLocaleString("en")} tokens per second.`;
    parts.push(node("p", text, { class: found.fits ? "good" : "bad" }));
  }
  for (const line of found.conflicts) parts.push(node("p", `Disagrees: ${line}`, { class: "warn" }));
  for (const line of found.missing) parts.push(node("p", `No prediction yet, missing ${line}`, { class: "warn" }));
  const rows = (keys) => keys.map((key) => [node("code", key.key), key.value, key.meaning]);
  if (found.imported.not_understood.length) parts.push(table(["not understood", "value", "why"], rows(found.imported.not_understood)));
  if (found.imported.assumed.length) {
    const list = node("ul");
    for (const line of found.imported.assumed) list.append(node("li", line));
    parts.push(node("p", "Assumed:", { class: "muted" }), list);
  }
  const details = node("details");
  details.append(node("summary", "What was understood"), table(["key", "value", "meaning"], rows(found.imported.understood)));
  parts.push(details);
  target.replaceChildren(...parts);
}

async function recent() {
  const page = await api("/v1/plans?limit=10");
  if (!page.items.length) {
    $("recent").replaceChildren(node("p", "None yet.", { class: "muted" }));
    return;
  }
  const rows = page.items.map((job) => [node("a", job.id, { href: `/plans/${job.id}` }), job.status.replace("_", " "), job.created_at.slice(0, 19).replace("T", " ")]);
  $("recent").replaceChildren(table(["plan", "status", "asked (UTC)"], rows));
}

async function makeCluster() {
  const chosen = catalogue.node_presets.find((item) => item.name === $("node").value);
  const topology = $("topology").value.trim();
  const body = { name: "pasted", count: Number($("count").value), nccl_tests: $("nccl").value.trim() ? [$("nccl").value] : [] };
  Object.assign(body, topology ? { topology, device: chosen.device } : { preset: chosen.name });
  if ($("hostfile").value.trim()) body.hostfile = $("hostfile").value;
  try {
    $("cluster").value = JSON.stringify(await api("/v1/clusters/from-text", body), null, 1);
    $("cluster-details").open = true;
    $("cluster-problem").replaceChildren();
  } catch (error) {
    showProblem($("cluster-problem"), error);
  }
}

async function fill() {
  const names = await api("/v1/catalogue");
  catalogue = names;
  for (const name of names.model_presets) $("preset").append(node("option", name, { value: name }));
  for (const item of names.node_presets) $("node").append(node("option", `${item.name}: ${item.devices_per_node} × ${item.device}`, { value: item.name }));
  const usual = names.node_presets.find((item) => item.name === "dgx_h100") || names.node_presets[0];
  if (usual) $("node").value = usual.name;
  $("example").addEventListener("click", () => {
    for (const [id, value] of Object.entries(EXAMPLE)) $(id).value = value;
    if (!$("node").value) $("node").value = (names.node_presets.find((item) => item.device.includes("a100")) || usual).name;
    $("model").value = $("cluster").value = "";
    $("ask").requestSubmit();
  });
}

$("ask").addEventListener("submit", ask);
$("make-cluster").addEventListener("click", makeCluster);
$("judge-form").addEventListener("submit", judge);
fill().then(recent).catch((error) => showProblem($("problem"), error));
