// Stream an answer by gRPC: `npm install @grpc/grpc-js @grpc/proto-loader`, then `node examples/client.js`.
const grpc = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");

// Without keepCase, fields have camel-case names, and those of the contract, such as max_new_tokens, are dropped unseen.
const options = { includeDirs: [`${__dirname}/../protos`], keepCase: true, longs: String, enums: String, oneofs: true };
const { GenerationService } = grpc.loadPackageDefinition(loadSync("coppice/v1/generation.proto", options)).coppice.v1;
const address = process.env.COPPICE_ADDRESS || "127.0.0.1:50051";
const client = new GenerationService(address, grpc.credentials.createInsecure());

const call = client.Generate({ text: "Once upon a time", max_new_tokens: 64, sampling: { temperature: 0.8, seed: 3 } });
call.on("data", ({ kind, started, chunk, finished }) => {
  if (kind === "started") console.error(`seed ${started.seed}`);
  if (kind === "chunk") process.stdout.write(chunk.text);
  if (kind === "finished") console.error(`${finished.finish_reason}, ${finished.new_tokens} tokens`);
});
call.on("error", ({ code, details }) => console.error(`${grpc.status[code]}: ${details}`));
call.on("end", () => client.close());
