// train FOLDER BATCHES STEPS TO [FROM [PLACE]]: trains with an exported step, as bare.py does (docs/exported_steps.md).
//
//     g++ -std=c++17 -O2 -I ONNXRUNTIME/include train.cpp -o train -L ONNXRUNTIME/lib -l onnxruntime
//
// Needs onnxruntime's headers and library alone: JSON, SHA-256 and safetensors are the little that is needed of them.

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fs = std::filesystem;
using std::string;
template <class T>
using List = std::vector<T>;

[[noreturn]] void fail(const string& what) { throw std::runtime_error(what); }

// -- JSON: strings and numbers are their text, null is empty --------------------------------------------------
struct Json {
  string text;
  List<Json> items;
  List<std::pair<string, Json>> members;

  const Json* find(const string& name) const {
    for (const auto& [key, value] : members)
      if (key == name) return &value;
    return nullptr;
  }
  const Json& operator[](const string& name) const {
    const Json* found = find(name);
    return found ? *found : (fail("there is no '" + name + "' in the manifest or checkpoint"), *this);
  }
  List<int64_t> sizes() const {
    List<int64_t> found;
    for (const Json& item : items) found.push_back(std::stoll(item.text));
    return found;
  }
};

struct Parser {
  const string& s;
  size_t at = 0;

  char next() {
    at = s.find_first_not_of(" \t\r\n", at);
    return at < s.size() ? s[at] : (fail("a JSON file is cut short"), '\0');
  }
  bool skip(char c) { return next() == c && ++at; }
  string quoted() {
    string found;
    for (++at; at < s.size() && s[at] != '"'; ++at) {
      if (s[at] != '\\') { found += s[at]; continue; }
      const char c = s[++at];
      const size_t plain = string("nrtbf").find(c);
      if (c != 'u') { found += plain == string::npos ? c : "\n\r\t\b\f"[plain]; continue; }
      const unsigned code = std::stoul(s.substr(at + 1, 4), nullptr, 16);  // pairs of halves come out as CESU-8
      at += 4;
      if (code < 0x80) { found += char(code); continue; }
      if (code < 0x800) found += char(0xC0 | code >> 6);
      else found += char(0xE0 | code >> 12), found += char(0x80 | (code >> 6 & 0x3F));
      found += char(0x80 | (code & 0x3F));
    }
    ++at;
    return found;
  }
  Json value() {
    Json found;
    const char c = next();
    if (c == '"') found.text = quoted();
    else if (c == '{' || c == '[') {
      ++at;
      const char end = c == '{' ? '}' : ']';
      while (!skip(end)) {
        if (c == '[') found.items.push_back(value());
        else {
          next();
          string name = quoted();
          skip(':');
          found.members.emplace_back(std::move(name), value());
        }
        skip(',');
      }
    } else {
      const size_t end = s.find_first_of(",]} \t\r\n", at);
      found.text = s.substr(at, end - at);
      at = std::min(end, s.size());
      if (found.text == "null") found.text.clear();
    }
    return found;
  }
};

// -- files --------------------------------------------------------------------------------------------------
string sha256(string data) {
  static const uint32_t K[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
      0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
      0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
      0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
      0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
      0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = uint64_t(data.size()) * 8;
  data += char(0x80);
  data.resize((data.size() + 8 + 63) / 64 * 64);
  for (int i = 0; i < 8; ++i) data[data.size() - 1 - i] = char(bits >> 8 * i);
  auto turned = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  for (size_t block = 0; block < data.size(); block += 64) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; ++i) {
      const auto* p = reinterpret_cast<const unsigned char*>(&data[block + 4 * i]);
      w[i] = uint32_t(p[0]) << 24 | p[1] << 16 | p[2] << 8 | p[3];
    }
    for (int i = 16; i < 64; ++i)
      w[i] = w[i - 16] + w[i - 7] + (turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10);
    std::memcpy(v, h, sizeof h);
    for (int i = 0; i < 64; ++i) {
      const uint32_t a = v[0], e = v[4];
      const uint32_t one = v[7] + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
      const uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      std::memmove(v + 1, v, 7 * sizeof *v);
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  char text[65];
  for (int i = 0; i < 8; ++i) std::snprintf(text + 8 * i, 9, "%08x", h[i]);
  return text;
}

string read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) fail("'" + path.string() + "' cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

string checked(const fs::path& path, const Json& said) {
  string data = read(path);
  if (sha256(data) != said["sha256"].text) fail("'" + path.string() + "' was changed: its SHA-256 is not the one recorded");
  return data;
}

void checked_all(const fs::path& folder, const Json& files) {
  for (const auto& [name, file] : files.members) checked(folder / name, file);
}

Json parsed(const fs::path& path) {
  const string text = read(path);
  try { return Parser{text}.value(); } catch (const std::exception&) { fail("'" + path.string() + "' is no JSON, or cut short"); }
}

void write(const fs::path& path, const string& data) {
  if (!(std::ofstream(path, std::ios::binary) << data << std::flush)) fail("'" + path.string() + "' cannot be written");
}

// -- tensors ------------------------------------------------------------------------------------------------
struct Kind { const char* name; const char* code; size_t size; ONNXTensorElementDataType type; };
const Kind KINDS[] = {
    {"bool", "BOOL", 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},       {"uint8", "U8", 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {"int8", "I8", 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},         {"uint16", "U16", 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16},
    {"int16", "I16", 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},      {"uint32", "U32", 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32},
    {"int32", "I32", 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},      {"uint64", "U64", 8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64},
    {"int64", "I64", 8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},      {"float16", "F16", 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {"bfloat16", "BF16", 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}, {"float32", "F32", 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {"float64", "F64", 8, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE}};

const Kind& kind(const string& name) {
  for (const Kind& each : KINDS)
    if (name == each.name || name == each.code) return each;
  fail("element type " + name + " is not known");
}

size_t count(const List<int64_t>& shape) {
  size_t found = 1;
  for (int64_t size : shape) found *= size;
  return found;
}

struct Tensor { string dtype; List<int64_t> shape; string data; };
string shown(const string& dtype, const List<int64_t>& shape) {
  string text = dtype + " [";
  for (int64_t size : shape) text += (text.back() == '[' ? "" : ", ") + std::to_string(size);
  return text + "]";
}

std::map<string, Tensor> safetensors(const string& data) {
  uint64_t length = 0;
  if (data.size() < 8) fail("a file of tensors is cut short");
  std::memcpy(&length, data.data(), 8);
  if (length > data.size() - 8) fail("a file of tensors is cut short");
  const string text = data.substr(8, length);
  std::map<string, Tensor> found;
  for (const auto& [name, said] : Parser{text}.value().members) {
    if (name == "__metadata__") continue;
    const List<int64_t> ends = said["data_offsets"].sizes();
    const Kind& of = kind(said["dtype"].text);
    const List<int64_t> shape = said["shape"].sizes();
    const size_t first = ends.at(0), end = ends.at(1);
    if (end < first || end > data.size() - 8 - length) fail("a file of tensors is cut short: there is no '" + name + "'");
    if (end - first != count(shape) * of.size) fail("'" + name + "' of a file of tensors has not the size of its shape");
    found[name] = {of.name, shape, data.substr(8 + length + first, end - first)};
  }
  return found;
}

const Tensor& fitting(const std::map<string, Tensor>& held, const Json& said, const string& what) {
  const auto found = held.find(said["name"].text);
  const string wanted = shown(said["dtype"].text, said["shape"].sizes());
  const string is = found == held.end() ? "missing" : shown(found->second.dtype, found->second.shape);
  if (is != wanted) fail(what + " '" + said["name"].text + "' is " + is + "; expected " + wanted);
  return found->second;
}

Ort::Value value(const string& dtype, const List<int64_t>& shape, const void* data) {
  Ort::AllocatorWithDefaultOptions allocator;
  Ort::Value made = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), kind(dtype).type);
  std::memcpy(made.GetTensorMutableRawData(), data, count(shape) * kind(dtype).size);
  return made;
}

string widened(const string& bits) {  // bfloat16 as fp32, which has 16 more bits behind
  string found(2 * bits.size(), '\0');
  for (size_t i = 0; i < bits.size(); i += 2) std::memcpy(&found[2 * i + 2], &bits[i], 2);
  return found;
}

string narrowed(const string& bits) {
  string found(bits.size() / 2, '\0');
  for (size_t i = 0; i < found.size(); i += 2) std::memcpy(&found[i], &bits[2 * i + 2], 2);
  return found;
}

// -- the step -----------------------------------------------------------------------------------------------
struct Step {
  Json said, models;
  Ort::Env env{ORT_LOGGING_LEVEL_ERROR, "train"};
  std::map<string, Ort::Session> sessions;
  std::map<string, Ort::Value> state;
  int64_t step = 0;

  Step(const fs::path& folder, const fs::path& checkpoint, string place) : said(parsed(folder / "manifest.json")) {
    const string found = said["format"].text + " version " + said["version"].text;
    if (found != "amp_transpiler.training_step version 1")
      fail("'" + folder.string() + "' holds " + found + "; this reads amp_transpiler.training_step version 1");
    const List<Json>& places = said["places"].items;
    if (place.empty()) place = places.at(0)["place"].text;
    if (place != "cpu" && place != "webgpu") fail("'" + folder.string() + "' holds a step for " + place + "; this has cpu and webgpu");
    for (const Json& each : places)
      if (each["place"].text == place) models = each["models"], checked_all(folder, each["files"]);
    if (models.members.empty()) fail("'" + folder.string() + "' holds no step for " + place);
    checked_all(folder, said["files"]);
    for (const auto& [name, model] : models.members) {
      Ort::SessionOptions options;  // of each session: a provider's device is counted by them
      options.AddConfigEntry("session.disable_quant_qdq", "1");  // what is fake-quantised trains as it is
      if (place == "webgpu") options.AppendExecutionProvider("WebGPU");
      sessions.emplace(name, Ort::Session(env, (folder / model["file"].text).c_str(), options));
    }
    load(checkpoint);
  }

  void load(const fs::path& folder) {
    const Json meta = parsed(folder / "meta.json");
    if (meta["program"]["fingerprint"].text != said["program"]["fingerprint"].text)
      fail("'" + folder.string() + "' is a checkpoint of another program, '" + meta["program"]["name"].text + "'");
    const auto held = safetensors(checked(folder / meta["file"]["name"].text, meta["file"]));
    for (const Json& one : said["states"].items) {
      const Tensor& found = fitting(held, one, "state");
      const string& as = one["carried"].text;
      state.insert_or_assign(one["name"].text, value(as, found.shape, (as == found.dtype ? found.data : widened(found.data)).data()));
    }
    step = meta["step"].text.empty() ? 0 : std::stoll(meta["step"].text);
  }

  // Run a model of the folder; gives what it fetches, by name, and replaces the state that it updates.
  List<std::pair<string, Ort::Value>> run(const string& name, const std::map<string, Tensor>& feeds) {
    const Json& model = models[name];
    List<Ort::Value> made;
    List<const char*> inputs, outputs;
    List<const OrtValue*> given;
    const float zero = 0;
    for (const Json& feed : model["feeds"].items) {
      const Tensor& found = fitting(feeds, feed, "feed");
      made.push_back(value(found.dtype, found.shape, found.data.data()));
      inputs.push_back(feed["input"].text.c_str());
    }
    for (const Json& input : model["zeros"].items) {
      made.push_back(value("float32", {}, &zero));
      inputs.push_back(input.text.c_str());
    }
    for (const Ort::Value& each : made) given.push_back(each);
    for (const auto& [variable, input] : model["states"].members) {
      given.push_back(state.at(variable));
      inputs.push_back(input.text.c_str());
    }
    for (const Json& fetch : model["fetches"].items) outputs.push_back(fetch["output"].text.c_str());
    for (const auto& [variable, output] : model["updates"].members) outputs.push_back(output.text.c_str());
    List<OrtValue*> results(outputs.size(), nullptr);
    Ort::ThrowOnError(Ort::GetApi().Run(sessions.at(name), nullptr, inputs.data(), given.data(), given.size(),
                                        outputs.data(), outputs.size(), results.data()));
    List<std::pair<string, Ort::Value>> fetched;
    auto result = results.begin();
    for (const Json& fetch : model["fetches"].items) fetched.emplace_back(fetch["name"].text, Ort::Value(*result++));
    for (const auto& [variable, output] : model["updates"].members) state.insert_or_assign(variable, Ort::Value(*result++));
    return fetched;
  }

  List<std::pair<string, Ort::Value>> train(const std::map<string, Tensor>& feeds) {
    const Json& window = said["window"];
    const string& counter = window["counter"].text;
    const int64_t run_of = counter.empty() ? 1 : *state.at(counter).GetTensorMutableData<int32_t>() + 1;
    ++step;
    return run(std::to_string(run_of) == window["steps"].text ? "train" : "accumulate", feeds);
  }

  void save(const fs::path& folder) {
    string header = "{\"__metadata__\":{\"format\":\"" + said["checkpoint"]["metadata"]["format"].text + "\"}", data;
    for (const Json& one : said["states"].items) {
      const List<int64_t> shape = one["shape"].sizes();
      const string &as = one["carried"].text, &dtype = one["dtype"].text;
      const auto* bytes = static_cast<const char*>(state.at(one["name"].text).GetTensorMutableRawData());
      string content(bytes, count(shape) * kind(as).size);
      if (as != dtype) content = narrowed(content);
      string name, sizes = shown("", shape).substr(1);
      for (char c : one["name"].text) {
        char code[7];
        std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned char>(c));
        name += c == '"' || c == '\\' ? string("\\") + c : uint8_t(c) < ' ' ? string(code) : string(1, c);
      }
      header += ",\"" + name + "\":{\"dtype\":\"" + kind(dtype).code + "\",\"shape\":" + sizes + ",\"data_offsets\":[" +
                std::to_string(data.size()) + "," + std::to_string(data.size() + content.size()) + "]}";
      data += content;
    }
    header += '}';
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    data = string(reinterpret_cast<const char*>(&length), 8) + header + data;
    string text = said["checkpoint"]["meta"].text;
    for (const auto& [mark, known] : List<std::pair<string, string>>{{"${step}", std::to_string(step)},
                                                                     {"${bytes}", std::to_string(data.size())},
                                                                     {"${sha256}", sha256(data)},
                                                                     {"${runner}", "train.cpp"}})
      for (size_t at; (at = text.find(mark)) != string::npos;) text.replace(at, mark.size(), known);
    const fs::path part = folder.string() + ".part";  // until it is whole
    fs::create_directory(part);
    write(part / "state.safetensors", data);
    write(part / "meta.json", text.substr(0, text.size() - 1) + ",\"checksum\":\"" + sha256(text) + "\"}");
    fs::rename(part, folder);
  }
};

int main(int number, char** words) try {
  if (number < 5) fail("usage: train FOLDER BATCHES STEPS TO [FROM [PLACE]]");
  const string steps = words[3];
  if (steps.empty() || steps.size() > 18 || steps.find_first_not_of("0123456789") != string::npos)
    fail("STEPS is '" + steps + "'; expected a whole number");
  fs::path to = fs::absolute(words[4]);
  if (!to.has_filename()) to = to.parent_path();  // of a '/' in the end
  if (fs::exists(to)) fail("'" + to.string() + "' is there already");
  if (!fs::is_directory(to.parent_path())) fail("there is no folder '" + to.parent_path().string() + "'");
  Step step(words[1], words[number > 5 ? 5 : 1], number > 6 ? words[6] : "");
  const auto batches = safetensors(read(words[2]));
  for (const auto& [name, all] : batches)
    if (all.shape.empty() || all.shape[0] != batches.begin()->second.shape[0]) fail("feeds in '" + string(words[2]) + "' differ in length");
  for (int64_t left = std::stoll(steps); left > 0; --left) {
    std::map<string, Tensor> feeds;
    for (const auto& [name, all] : batches) {
      if (all.shape.empty() || all.shape[0] < 1) fail("'" + name + "' in '" + words[2] + "' has no batches");
      const List<int64_t> shape(all.shape.begin() + 1, all.shape.end());
      const size_t size = count(shape) * kind(all.dtype).size;
      feeds[name] = {all.dtype, shape, all.data.substr(step.step % all.shape[0] * size, size)};
    }
    const auto fetched = step.train(feeds);
    std::printf("step %lld", static_cast<long long>(step.step));
    for (const auto& [name, found] : fetched) {
      const auto type = found.GetTensorTypeAndShapeInfo().GetElementType();
      const void* data = found.GetTensorRawData();
      if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) std::printf(" %s %.9g", name.c_str(), *static_cast<const float*>(data));
      if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL) std::printf(" %s %d", name.c_str(), *static_cast<const bool*>(data));
    }
    std::printf("\n");
  }
  step.save(to);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
