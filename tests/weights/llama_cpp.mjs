// Greedy text of a GGUF file by llama.cpp: prints {ids, new, text, probabilities} as JSON; the
// last are those of all tokens to be the first new one.
//     NODE_LLAMA_CPP=FOLDER node llama_cpp.mjs FILE.gguf PROMPT COUNT
// FOLDER is where `npm install node-llama-cpp` was run.
const folder = process.env.NODE_LLAMA_CPP;
const {getLlama, LlamaLogLevel} = await import(`${folder}/node_modules/node-llama-cpp/dist/index.js`);

const [file, prompt, count] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file});
const ids = model.tokenize(prompt);
const full = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"};
const context = await model.createContext({contextSize: 256, threads: 1, flashAttention: false, ...full});
const found = [];
let first;
const sequence = context.getSequence();
const greedy = {temperature: 0, yieldEogToken: true};
for await (const {token, probabilities} of sequence.evaluateWithMetadata(ids, {probabilities: true}, greedy)) {
    first ??= [...probabilities];
    found.push(token);
    if (found.length >= Number(count))
        break;
}
console.log(JSON.stringify({ids, new: found, text: model.detokenize(found), probabilities: first}));
process.exit(0);
