// Makes the calls of a plan with grpc-js; see tests/interop/plan.py.
"use strict";
const fs = require("fs");
const readline = require("readline");
const grpc = require("@grpc/grpc-js");

const same = (bytes) => bytes;
const client = new grpc.Client(`127.0.0.1:${process.argv[2]}`, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": -1,
});

function unary(path, message, deadlineMs, metadata, begun = () => {}) {
  return new Promise((resolve) => {
    const options = { deadline: Date.now() + deadlineMs };
    begun(
      client.makeUnaryRequest(path, same, same, message, metadata, options, (error, answer) =>
        resolve({ code: error ? error.code : 0, text: error ? error.details : "", answers: [answer] }),
      ),
    );
  });
}

function stream(path, message, count, deadlineMs) {
  return new Promise((resolve) => {
    const answers = [];
    const call = client.makeBidiStreamRequest(path, same, same, new grpc.Metadata(), {
      deadline: Date.now() + deadlineMs,
    });
    call.on("data", (answer) => answers.push(answer));
    call.on("error", () => {});
    call.on("status", (status) => resolve({ code: status.code, text: status.details, answers }));
    for (let i = 0; i < count; i++) call.write(message);
    call.end();
  });
}

async function make(op, path, message, count, deadlineMs) {
  const metadata = new grpc.Metadata();
  switch (op) {
    case "gzip":
      metadata.set("grpc-internal-encoding-request", "gzip");
      return unary(path, message, deadlineMs, metadata);
    case "cancel":
      return unary(path, message, deadlineMs, metadata, (call) =>
        setTimeout(() => call.cancel(), count),
      );
    case "stream":
      return stream(path, message, count, deadlineMs);
    case "many": {
      const all = [];
      for (let i = 0; i < count; i++) all.push(unary(path, message, deadlineMs, metadata));
      const found = await Promise.all(all);
      return { ...found[0], code: Math.max(...found.map((one) => one.code)), answers: found.flatMap((one) => one.answers) };
    }
    default:
      return unary(path, message, deadlineMs, metadata);
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [op, path, file, count, deadlineMs] = line.split(" ");
    const found = await make(op, path, fs.readFileSync(file), +count, +deadlineMs);
    const sizes = found.answers.filter((one) => one).map((one) => one.length);
    if (sizes.length) fs.writeFileSync(`${file}.answer`, found.answers[0]);
    console.log(`${found.code} ${sizes.length} ${Buffer.from(found.text).toString("hex")}`);
  }
  client.close();
}

main();
