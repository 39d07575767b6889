// One question by npm's `ai`: prints the text, why it ended, and the error that a program would catch, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseURL, how] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "pomona", baseURL, apiKey: process.env.POMONA_API_KEY });
const asked = { model: provider("chat"), prompt: "hi" };
const seen = { text: "", error: null };
try {
  if (how === "stream") {
    const result = streamText({ ...asked, onError: () => {} });
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") seen.text += part.text;
    }
    seen.reason = await result.finishReason;
  } else {
    const result = await generateText(asked);
    Object.assign(seen, { text: result.text, reason: result.finishReason });
  }
} catch (error) {
  const last = error.lastError ?? error;
  seen.error = { name: last.name ?? "", status: last.statusCode ?? null, message: String(last.message ?? last) };
}
console.log(JSON.stringify(seen));
