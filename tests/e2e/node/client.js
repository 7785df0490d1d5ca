// Streams a chat from a gateway with what npm has and the files in protos/; says what it heard as one JSON object.
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const { ADDRESS: address, API_KEY: key, MODEL: model, PROTOS: protos } = process.env;

const definition = protoLoader.loadSync("headrace/api/inference/v1/inference_service.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).headrace.api.inference.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

function metadata(apiKey) {
  const made = new grpc.Metadata();
  made.set("authorization", `Bearer ${apiKey}`);
  return made;
}

function within(seconds) {
  return { deadline: new Date(Date.now() + 1000 * seconds) };
}

// The events of one Chat until its end, or until `leaveAfter` deltas; `error` is the status it ended with, if any.
function chat(apiKey, sampling, leaveAfter = Infinity) {
  return new Promise((resolve) => {
    const heard = { started: null, text: "", token_ids: [], deltas: 0, finished: null, error: null };
    const request = { model, messages: [{ role: "user", content: "Why is the sky blue?" }], sampling };
    const call = client.Chat(request, metadata(apiKey), within(60));
    call.on("data", (message) => {
      if (message.event !== "delta") {
        heard[message.event] = message[message.event];
        return;
      }
      heard.deltas += 1;
      heard.text += message.delta.text;
      heard.token_ids.push(...message.delta.token_ids);
      if (heard.deltas === leaveAfter) call.cancel();
    });
    call.on("error", (error) => {
      heard.error = { code: grpc.status[error.code], details: error.details };
      resolve(heard);
    });
    call.on("end", () => resolve(heard));
  });
}

function listModels() {
  return new Promise((resolve, reject) => {
    client.ListModels({}, metadata(key), within(10), (error, response) => (error ? reject(error) : resolve(response)));
  });
}

async function main() {
  const heard = {
    models: (await listModels()).models.map((one) => one.name),
    chat: await chat(key, { max_tokens: 24, temperature: 0.5, seed: 7 }),
    stranger: await chat("hr_unknown", {}),
    wrong: await chat(key, { top_p: 1.5 }),
    left: await chat(key, { max_tokens: 2000, ignore_eos: true }, 3),
  };
  client.close();
  console.log(JSON.stringify(heard));
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
