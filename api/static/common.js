"use strict";
// What both pages use: requests with the token of this tab, problems in words, numbers with units, tables from rows.
const $ = (id) => document.getElementById(id);

function headers(extra = {}) {
  const token = sessionStorage.getItem("token");
  return token ? { ...extra, Authorization: `Bearer ${token}` } : extra;
}

async function api(path, body, method) {
  const given = body === undefined ? { headers: headers() } : { method: "POST", body: JSON.stringify(body), headers: headers({ "Content-Type": "application/json" }) };
  const response = await fetch(path, method ? { ...given, method } : given);
  const found = response.status === 204 ? null : await response.json();
  if (response.ok) return found;
  if (response.status === 401) $("token-form").hidden = false;
  throw Object.assign(new Error(found.detail || response.statusText), { errors: found.errors || [] });
}

function node(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function showProblem(target, error) {
  target.replaceChildren(node("p", error.message, { class: "bad" }));
  if (error.errors && error.errors.length) {
    const list = node("ul");
    for (const item of error.errors) {
      const near = item.nearest === null || item.nearest === undefined ? "" : `; nearest: ${item.nearest}`;
      list.append(node("li", `${item.loc.join(".")}: ${item.msg}${near}`));
    }
    target.append(list);
  }
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1) return `${value.toFixed(3)} s`;
  return size >= 1e-3 ? `${(value * 1e3).toFixed(2)} ms` : `${(value * 1e6).toFixed(1)} µs`;
}

function bytes(value) {
  const gib = value / 2 ** 30;
  return Math.abs(gib) >= 1 ? `${gib.toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

// heads: names, those that begin with '>' are numbers. rows: arrays of texts or nodes.
function table(heads, rows, caption) {
  const made = node("table");
  if (caption) made.append(node("caption", caption, { class: "muted" }));
  const head = node("tr");
  for (const name of heads) head.append(node("th", name.replace(/^>/, ""), { scope: "col", ...(name.startsWith(">") ? { class: "n" } : {}) }));
  made.append(node("thead"));
  made.tHead.append(head);
  const body = node("tbody");
  for (const row of rows) {
    const line = node("tr");
    row.forEach((cell, index) => {
      const td = node("td", undefined, heads[index].startsWith(">") ? { class: "n" } : {});
      td.append(cell instanceof Node ? cell : String(cell ?? ""));
      line.append(td);
    });
    body.append(line);
  }
  made.append(body);
  return made;
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value);
  location.reload();
});
