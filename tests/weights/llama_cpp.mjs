// Greedy text of a GGUF file by llama.cpp: prints {ids, new, text} as JSON.
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
for await (const token of context.getSequence().evaluate(ids, {temperature: 0, yieldEogToken: true})) {
    found.push(token);
    if (found.length >= Number(count))
        break;
}
console.log(JSON.stringify({ids, new: found, text: model.detokenize(found)}));
process.exit(0);
