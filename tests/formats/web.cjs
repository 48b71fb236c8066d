// Predict batches of frames (RGBA, one after the other on standard input) in onnxruntime-web, and print them as JSON.
// Begins with the state in a file, if it exists, and leaves the state there.
const fs = require("node:fs");
const v8 = require("node:v8");
const { pathToFileURL } = require("node:url");
const ort = require("onnxruntime-web"); // from NODE_PATH, or a folder node_modules above

v8.setFlagsFromString("--liftoff-only"); // V8 would compile everything once more before the process ends: 4 s
ort.env.wasm.numThreads = 1;

async function main([example, model, stateFile, batchSize]) {
  const { Classifier } = await import(pathToFileURL(example));
  const classifier = await Classifier.load(ort, new Uint8Array(fs.readFileSync(model)));
  if (fs.existsSync(stateFile)) classifier.reset(new Float32Array(new Uint8Array(fs.readFileSync(stateFile)).buffer));
  const [height, width] = classifier.preprocessing.input_size;
  const [bytes, size] = [fs.readFileSync(0), 4 * height * width];
  const frames = Array.from({ length: bytes.length / size }, (_, i) => bytes.subarray(i * size, (i + 1) * size));
  const source = [...(await classifier.predictSource(frames[0]))];
  const result = { labels: classifier.labels, source, probabilities: [], images: 0 };
  for (let i = 0; i < frames.length; i += +batchSize) {
    const { probabilities, status } = await classifier.predict(frames.slice(i, i + +batchSize));
    result.probabilities.push(...probabilities.map((row) => [...row]));
    result.images = status.images;
  }
  fs.writeFileSync(stateFile, classifier.state);
  console.log(JSON.stringify(result));
}

main(process.argv.slice(2));
