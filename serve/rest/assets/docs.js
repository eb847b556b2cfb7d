"use strict";
// Shows the OpenAPI document of this server, and sends requests to it.

const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};

// JSON with short lists on one line, so that matrices stay readable.
const pretty = (value) =>
  JSON.stringify(value, null, 2).replace(/\[[^[\]{}]*\]/g, (list) =>
    list.replace(/\s+/g, " ").length < 400 ? list.replace(/\s+/g, " ") : list);

const NOT_OFFERED = "Not offered";

let lastId = 0;
const labelled = (text, field) => {
  field.id = `field-${++lastId}`;
  return [make("label", { htmlFor: field.id, textContent: text }), field];
};

function operationNode(path, method, operation) {
  const form = make("form");
  const fields = new Map();
  const parameters = operation.parameters || [];
  for (const parameter of parameters) {
    const field = make("input", { required: Boolean(parameter.required), name: parameter.name });
    fields.set(parameter, field);
    const more = parameter.description ? `: ${parameter.description}` : "";
    form.append(...labelled(`${parameter.name} (${parameter.in})${more}`, field));
  }
  const content = operation.requestBody?.content["application/json"];
  const body = content && make("textarea", { name: "body", spellcheck: false });
  if (content?.examples && Object.keys(content.examples).length) {
    const examples = make("select", { name: "example" });
    for (const name of Object.keys(content.examples)) {
      examples.append(make("option", { value: name, textContent: name }));
    }
    const fill = () => {
      body.value = pretty(content.examples[examples.value].value);
      for (const [parameter, field] of fields) {
        if (parameter.name === "model") field.value = examples.value;
        if (parameter.name === "version" && !field.value) field.value = "1";
      }
    };
    examples.addEventListener("change", fill);
    fill();
    form.prepend(...labelled("Example request of model", examples));
  }
  if (body) form.append(...labelled("Body (JSON)", body));
  const button = make("button", { type: "submit", textContent: "Execute" });
  const result = make("div", { className: "result", hidden: true, role: "status" });
  form.append(button);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await execute(path, method, fields, body, result);
    } finally {
      button.disabled = false;
    }
  });
  const summary = make("summary", {},
    make("span", { className: `method ${method}`, textContent: method.toUpperCase() }),
    make("code", { textContent: path }),
    make("span", { textContent: operation.summary }));
  const node = make("details", {}, summary, form, result);
  node.dataset.operation = operation.operationId;
  return node;
}

async function execute(path, method, fields, body, result) {
  const headers = {};
  let url = path;
  for (const [parameter, field] of fields) {
    if (parameter.in === "path") {
      url = url.replace(`{${parameter.name}}`, encodeURIComponent(field.value));
    } else if (field.value) {
      headers[parameter.name] = field.value;
    }
  }
  const options = { method: method.toUpperCase(), headers };
  if (body?.value.trim()) {
    options.body = body.value;
    headers["Content-Type"] = "application/json";
  }
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const command = ["curl", "-X", options.method, quote(location.origin + url)];
  for (const [name, value] of Object.entries(headers)) command.push("-H", quote(`${name}: ${value}`));
  if (options.body) command.push("-d", quote(options.body.replace(/\s+/g, " ")));
  const began = performance.now();
  const status = make("p", { className: "status" });
  const text = make("pre", { tabIndex: 0 });
  try {
    const answer = await fetch(url, options);
    const received = await answer.text();
    const took = (performance.now() - began).toFixed(1);
    status.textContent = `${answer.status} ${answer.statusText} in ${took} ms`;
    status.classList.add(answer.ok ? "good" : "bad");
    status.dataset.status = answer.status;
    let shown = received;
    try { shown = pretty(JSON.parse(received)); } catch { /* it is not JSON */ }
    text.textContent = shown.length > 100000 ? shown.slice(0, 100000) + "\n…" : shown || "(empty)";
  } catch (error) {
    status.textContent = `No answer: ${error.message}`;
    status.classList.add("bad");
  }
  result.replaceChildren(status, text,
    make("label", { textContent: "The same by curl" }),
    make("pre", { tabIndex: 0, textContent: command.join(" ") }));
  result.hidden = false;
  result.scrollIntoView({ block: "nearest" });
}

async function show() {
  const main = document.getElementById("operations");
  try {
    const answer = await fetch("/openapi.json");
    const api = await answer.json();
    if (!answer.ok) throw new Error(api.error);
    document.getElementById("version").textContent = api.info.version;
    document.getElementById("about").textContent = api.info.description;
    const groups = new Map();
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        const [tag] = operation.tags;
        if (!groups.has(tag)) groups.set(tag, []);
        groups.get(tag).push(operationNode(path, method, operation));
      }
    }
    main.replaceChildren();
    // What is not offered comes last, folded up.
    for (const [tag, nodes] of groups) {
      if (tag !== NOT_OFFERED) main.append(make("h2", { textContent: tag }), ...nodes);
    }
    const rest = groups.get(NOT_OFFERED);
    if (rest) main.append(make("details", { className: "rest" }, make("summary", { textContent: `${NOT_OFFERED}: ${rest.length} more paths of the protocol` }), ...rest));
  } catch (error) {
    main.textContent = `The description cannot be read: ${error.message}`;
  }
}

show();
