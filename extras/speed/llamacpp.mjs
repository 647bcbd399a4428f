// Writes greedy tokens with llama.cpp, as run.c of llama2.c does: the tokens on stdout, and
// llama.cpp's own tokens per second on stderr.
//     node llamacpp.mjs NODE_LLAMA_CPP_FOLDER FILE.gguf CACHE_FORMAT COUNT
// OMP_NUM_THREADS is the number of threads.
const [folder, file, kind, count] = process.argv.slice(2);
const {getLlama, LlamaLogLevel} = await import(`${folder}/node_modules/node-llama-cpp/dist/index.js`);

let log = "";
const threads = Number(process.env.OMP_NUM_THREADS);
const quiet = {logLevel: LlamaLogLevel.info, logger: (level, message) => (log += message)};
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, ...quiet});

const model = await llama.loadModel({modelPath: file});
const cache = {experimentalKvCacheKeyType: kind, experimentalKvCacheValueType: kind};
const context = await model.createContext({threads, performanceTracking: true, ...cache});

async function write(n) {
    const tokens = [], sequence = context.getSequence();
    for await (const token of sequence.evaluate([1], {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        if (tokens.length >= n)
            break;
    }
    await sequence.dispose();
    return tokens;
}

await write(16);
await context.printTimings(); // which also resets them
log = "";
const tokens = await write(Number(count));
await context.printTimings();
const speed = /: +eval time.* ([0-9.]+) tokens per second/.exec(log)[1];
console.log(tokens.join(" "));
console.error(speed);
process.exit(0);
