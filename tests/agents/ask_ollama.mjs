// Every call of npm's `ollama` that needs no other machine: prints what a program sees, as JSON.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const messages = [{ role: "user", content: "hi" }];
const tools = [
  { type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } } },
];

async function join(parts, pick) {
  let text = "";
  for await (const part of parts) text += pick(part) ?? "";
  return text;
}

async function refuse(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { status: error.status_code ?? null, message: error.error ?? error.message };
  }
}

const whole = await client.chat({ model: "chat", messages });
const called = await client.chat({ model: "caller", messages, tools });
const thought = await client.chat({ model: "caller", messages, tools, think: true, stream: true });
const stopped = await client.chat({ model: "endless", messages, stream: true });
let pieces = 0;
for await (const _ of stopped) if (++pieces === 3) break;
console.log(
  JSON.stringify({
    whole: whole.message.content,
    stream: await join(await client.chat({ model: "chat", messages, stream: true }), (part) => part.message.content),
    generated: await join(await client.generate({ model: "chat", prompt: "hi", stream: true }), (part) => part.response),
    calls: called.message.tool_calls,
    thought: await join(thought, (part) => part.message.thinking),
    pieces,
    vectors: (await client.embed({ model: "embed", input: ["a", "b"] })).embeddings.map((vector) => vector.length),
    older: (await client.embeddings({ model: "embed", prompt: "a" })).embedding.length,
    listed: (await client.list()).models.map((model) => model.name).sort(),
    loaded: (await client.ps()).models.length,
    shown: (await client.show({ model: "chat" })).details.format,
    version: (await client.version()).version,
    pulled: (await client.pull({ model: "chat" })).status,
    errors: {
      unknown: await refuse(() => client.chat({ model: "nobody", messages })),
      pull: await refuse(async () => join(await client.pull({ model: "nobody", stream: true }), () => "")),
      create: await refuse(() => client.create({ model: "x", from: "chat" })),
      deleted: await refuse(() => client.delete({ model: "chat" })),
    },
  }),
);
process.exit(0);
