// Classify frames with a file that adapts itself, in ONNX Runtime for the web, in a browser or in Node.js.

export class Classifier {
  /** Load a file, given as Uint8Array, with the module onnxruntime-web. */
  static async load(ort, bytes) {
    const facts = metadata(bytes);
    if (!facts.adaptive) throw new Error("the file does not adapt itself; remtta export --adaptive makes one that does");
    return new Classifier(ort, await ort.InferenceSession.create(bytes, { enableMemPattern: false }), facts);
  }

  constructor(ort, session, facts) {
    this.ort = ort;
    this.session = session;
    [this.images, this.zero] = session.inputMetadata;
    this.labels = JSON.parse(facts.labels);
    this.preprocessing = JSON.parse(facts.preprocessing);
    this.statusNames = JSON.parse(facts.adaptive);
    this.reset();
  }

  /** Begin a new stream, or continue the one with this state (Float32Array). */
  reset(state = new Float32Array(this.zero.shape[0])) {
    this.state = state;
  }

  /** Predict a batch of frames (RGBA, of the input's size): probabilities of each, and the status after them. */
  async predict(frames) {
    const [probabilities, state, status] = await this.#run(frames, this.state);
    this.state = state;
    return { probabilities, status: Object.fromEntries(this.statusNames.map((name, i) => [name, status[i]])) };
  }

  /** Predict a frame without adaptation: the first image of a stream stays as it is, or nearly with batch norms. */
  async predictSource(frame) {
    const [[probabilities]] = await this.#run([frame], new Float32Array(this.zero.shape[0]));
    return probabilities;
  }

  async #run(frames, state) {
    const count = this.images.shape[0]; // a name, if it is free
    if (typeof count === "number" && count !== frames.length) {
      throw new Error(`the file takes ${count} images at once; export its classifier for any number of them`);
    }
    const feeds = { images: this.#preprocess(frames), state: new this.ort.Tensor("float32", state, [state.length]) };
    const outputs = await this.session.run(feeds);
    const [name] = this.session.outputNames; // logits or probabilities
    const values = outputs[name].data;
    const size = values.length / frames.length;
    const rows = frames.map((_, i) => values.slice(i * size, (i + 1) * size));
    return [name === "logits" ? rows.map(softmax) : rows, outputs.next_state.data, outputs.status.data];
  }

  /** Normalise frames, and order their values as the file takes them. */
  #preprocess(frames) {
    const { input_size: [height, width], mean, std } = this.preprocessing;
    const area = height * width;
    const channelsLast = this.images.shape[3] === 3;
    const pixels = this.images.type === "uint8"; // which the file normalises itself
    const values = new (pixels ? Uint8Array : Float32Array)(frames.length * 3 * area);
    frames.forEach((frame, i) => {
      for (let at = 0; at < area; at++) {
        for (let c = 0; c < 3; c++) {
          const to = 3 * area * i + (channelsLast ? 3 * at + c : c * area + at);
          values[to] = pixels ? frame[4 * at + c] : (frame[4 * at + c] / 255 - mean[c]) / std[c];
        }
      }
    });
    const shape = channelsLast ? [height, width, 3] : [3, height, width];
    const data = this.images.type === "float16" ? toHalf(values) : values;
    return new this.ort.Tensor(this.images.type, data, [frames.length, ...shape]);
  }
}

/** Return finite numbers below 65,000 in half precision, as the runtime takes them: their bits. */
function toHalf(values) {
  const half = (bits) => Math.max(0, (((bits & 0x7fffffff) + 0x1000) >> 13) - 0x1c000); // below 6e-5: 0
  return Uint16Array.from(new Uint32Array(values.buffer), (bits) => ((bits >>> 16) & 0x8000) | half(bits));
}

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  const powers = logits.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

/** Return the metadata of an ONNX file, which onnxruntime-web does not: field 14 of the protocol buffer ModelProto. */
function metadata(bytes) {
  const facts = {};
  for (const [field, entry] of fields(bytes)) {
    if (field === 14) {
      const { 1: key, 2: value } = Object.fromEntries(fields(entry));
      facts[new TextDecoder().decode(key)] = new TextDecoder().decode(value);
    }
  }
  return facts;
}

/** Yield numbers and contents of a message's fields; all that ONNX files have here are strings, messages or integers. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0;
    let unit = 1;
    while (bytes[at] > 127) {
      value += (bytes[at++] - 128) * unit;
      unit *= 128;
    }
    return value + bytes[at++] * unit;
  };
  while (at < bytes.length) {
    const tag = varint();
    const value = varint();
    const isInteger = (tag & 7) === 0;
    yield [tag >> 3, isInteger ? value : bytes.subarray(at, at + value)];
    at += isInteger ? 0 : value;
  }
}
