// java -cp onnxruntime.jar Train.java FOLDER BATCHES STEPS TO [FROM]: trains with an exported step, as bare.py does.
//
// A sample: com.microsoft.onnxruntime:onnxruntime of Maven is all that it needs; JSON is the little that is read here.

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtSession;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;

public final class Train {
  static final String[][] TYPES = {
    {"bool", "BOOL", "1"}, {"uint8", "U8", "1"}, {"int8", "I8", "1"}, {"int16", "I16", "2"}, {"int32", "I32", "4"},
    {"uint32", "U32", "4"}, {"int64", "I64", "8"}, {"float16", "F16", "2"}, {"bfloat16", "BF16", "2"}, {"float32", "F32", "4"}, {"float64", "F64", "8"}};
  static final OrtEnvironment ENVIRONMENT = OrtEnvironment.getEnvironment();
  /** A model that casts int32 "x" to uint32 "y": a tensor of that type cannot be made of a buffer. */
  static final String UNSIGNED = "CAg6MgoXCgF4EgF5IgRDYXN0KgkKAnRvGAygAQISAWdaCQoBeBIECgIIBmIJCgF5EgQKAggMQgQKABAN";
  static OrtSession unsigned;

  /** A tensor as its bytes, little-endian. */
  record Tensor(String dtype, List<Object> shape, byte[] data) {
    ByteBuffer buffer() {
      return ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN);
    }
  }

  final Map<String, Object> said, models;
  final Map<String, OrtSession> sessions = new LinkedHashMap<>();
  final Map<String, Tensor> state = new LinkedHashMap<>();
  long step;

  Train(Path folder, Path checkpoint) throws Exception {
    said = map(parsed(folder.resolve("manifest.json")));
    expect(said.get("format") + " version " + said.get("version"), "amp_transpiler.training_step version 1", "what '" + folder + "' holds");
    Map<Object, Map<String, Object>> places = new LinkedHashMap<>();
    for (var one : maps(said.get("places"))) places.put(one.get("place"), one);
    if (!places.containsKey("cpu")) throw new IllegalArgumentException("'" + folder + "' has a step for " + places.keySet() + "; this runs those for cpu");
    for (Object files : List.of(said.get("files"), places.get("cpu").get("files"))) {
      for (var file : map(files).entrySet()) checked(folder.resolve(file.getKey()), map(file.getValue()));
    }
    models = map(places.get("cpu").get("models"));
    for (var model : models.entrySet()) {
      String path = folder.resolve((String) map(model.getValue()).get("file")).toString();
      OrtSession.SessionOptions options = new OrtSession.SessionOptions();
      options.addConfigEntry("session.disable_quant_qdq", "1"); // what is fake-quantised trains as it is
      sessions.put(model.getKey(), ENVIRONMENT.createSession(path, options));
    }
    Map<String, Object> meta = map(parsed(checkpoint.resolve("meta.json"))), file = map(meta.get("file"));
    expect(meta.get("program"), said.get("program"), "the program of checkpoint '" + checkpoint + "'");
    Map<String, Tensor> held = safetensors(checked(checkpoint.resolve((String) file.get("name")), file));
    for (var one : maps(said.get("states"))) {
      Tensor found = fitting(held.get(one.get("name")), one, "state");
      boolean as = one.get("carried").equals(found.dtype);
      state.put((String) one.get("name"), as ? found : new Tensor("float32", found.shape, moved(found.data, 2, 4)));
    }
    step = meta.get("step") == null ? 0 : (Long) meta.get("step");
  }

  /** Run a model of the folder; gives what it fetches, by name, and replaces the state that it updates. */
  Map<String, Tensor> run(String name, Map<String, Tensor> feeds) throws Exception {
    Map<String, Object> model = map(models.get(name));
    Map<String, OnnxTensor> inputs = new LinkedHashMap<>();
    Map<String, Tensor> fetched = new LinkedHashMap<>();
    try {
      for (var feed : maps(model.get("feeds"))) {
        inputs.put((String) feed.get("input"), tensor(fitting(feeds.get(feed.get("name")), feed, "feed")));
      }
      for (Object zero : list(model.get("zeros"))) inputs.put((String) zero, tensor(new Tensor("float32", List.of(), new byte[4])));
      for (var one : map(model.get("states")).entrySet()) inputs.put((String) one.getValue(), tensor(state.get(one.getKey())));
      var outputs = new LinkedHashSet<String>();
      for (var fetch : maps(model.get("fetches"))) outputs.add((String) fetch.get("output"));
      for (Object output : map(model.get("updates")).values()) outputs.add((String) output);
      try (OrtSession.Result made = sessions.get(name).run(inputs, outputs)) {
        for (var fetch : maps(model.get("fetches"))) fetched.put((String) fetch.get("name"), bytes(made, fetch.get("output"), null));
        for (var one : map(model.get("updates")).entrySet()) {
          state.put(one.getKey(), bytes(made, one.getValue(), state.get(one.getKey())));
        }
      }
      return fetched;
    } finally {
      inputs.values().forEach(OnnxTensor::close);
    }
  }

  Map<String, Tensor> train(Map<String, Tensor> feeds) throws Exception {
    Map<String, Object> window = map(said.get("window"));
    Object counter = window.get("counter");
    long count = counter == null ? 1 : state.get(counter).buffer().getInt(0) + 1;
    step += 1;
    return run(window.get("steps").equals(count) ? "train" : "accumulate", feeds);
  }

  void save(Path folder) throws Exception {
    var checkpoint = map(said.get("checkpoint"));
    var header = new StringBuilder("{\"__metadata__\":{\"format\":\"" + map(checkpoint.get("metadata")).get("format") + "\"}");
    var data = new ByteArrayOutputStream();
    for (var one : maps(said.get("states"))) {
      Tensor held = state.get(one.get("name"));
      byte[] content = one.get("dtype").equals(held.dtype) ? held.data : moved(held.data, 4, 2);
      header.append("," + Json.quoted((String) one.get("name")) + ":{\"dtype\":\"" + type((String) one.get("dtype"))[1] + "\",\"shape\":" + one.get("shape"));
      header.append(",\"data_offsets\":[" + data.size() + "," + (data.size() + content.length) + "]}");
      data.write(content);
    }
    byte[] text = header.append("}").toString().getBytes(StandardCharsets.UTF_8);
    int length = (text.length + 7) / 8 * 8;
    ByteBuffer all = ByteBuffer.allocate(8 + length + data.size()).order(ByteOrder.LITTLE_ENDIAN).putLong(length).put(text);
    while (all.position() < 8 + length) all.put((byte) ' ');
    byte[] file = all.put(data.toByteArray()).array();
    String meta = ((String) checkpoint.get("meta")).replace("${step}", "" + step).replace("${bytes}", "" + file.length);
    meta = meta.replace("${sha256}", sha256(file)).replace("${runner}", "Train.java");
    String checksum = sha256(meta.getBytes(StandardCharsets.UTF_8));
    Path part = Path.of(folder + ".part"); // until it is whole
    Files.createDirectories(part);
    Files.write(part.resolve("state.safetensors"), file);
    Files.writeString(part.resolve("meta.json"), meta.substring(0, meta.length() - 1) + ",\"checksum\":\"" + checksum + "\"}");
    Files.move(part, folder);
  }

  public static void main(String[] words) {
    try {
      if (words.length < 4) throw new IllegalArgumentException("usage: Train FOLDER BATCHES STEPS TO [FROM]");
      if (!words[2].matches("[0-9]{1,18}")) throw new IllegalArgumentException("STEPS is '" + words[2] + "'; expected a whole number");
      Path to = Path.of(words[3]).toAbsolutePath();
      if (Files.exists(to)) throw new IllegalArgumentException("'" + to + "' is there already");
      if (!Files.isDirectory(to.getParent())) throw new IllegalArgumentException("there is no folder '" + to.getParent() + "'");
      var step = new Train(Path.of(words[0]), Path.of(words[words.length > 4 ? 4 : 0]));
      Map<String, Tensor> batches = safetensors(Files.readAllBytes(Path.of(words[1])));
      if (batches.values().stream().map(all -> all.shape.isEmpty() ? null : all.shape.get(0)).distinct().count() > 1)
        throw new IllegalArgumentException("feeds in '" + words[1] + "' differ in length");
      for (long left = Long.parseLong(words[2]); left > 0; left--) {
        Map<String, Tensor> feeds = new LinkedHashMap<>();
        batches.forEach((name, all) -> {
          if (all.shape.isEmpty() || all.shape.get(0).equals(0L)) throw new IllegalArgumentException("'" + name + "' has no batches");
          int count = ((Long) all.shape.get(0)).intValue(), size = all.data.length / count, at = (int) (step.step % count) * size;
          byte[] part = Arrays.copyOfRange(all.data, at, at + size);
          feeds.put(name, new Tensor(all.dtype, all.shape.subList(1, all.shape.size()), part));
        });
        var line = new StringBuilder();
        for (var one : step.train(feeds).entrySet()) {
          Tensor found = one.getValue();
          if (found.dtype.equals("float32")) line.append(" " + one.getKey() + " " + found.buffer().getFloat(0));
          if (found.dtype.equals("bool")) line.append(" " + one.getKey() + " " + found.data[0]);
        }
        System.out.println("step " + step.step + line);
      }
      step.save(to);
    } catch (Exception error) {
      System.err.println("error: " + error.getMessage());
      System.exit(1);
    }
  }

  // -- tensors ---------------------------------------------------------------------------------------------------
  static String[] type(String name) {
    for (String[] each : TYPES) if (name.equals(each[0]) || name.equals(each[1])) return each;
    throw new IllegalArgumentException("onnxruntime's Java interface has no element type " + name);
  }

  static OnnxTensor tensor(Tensor held) throws Exception {
    long[] shape = held.shape.stream().mapToLong(size -> (Long) size).toArray();
    if (held.dtype.equals("uint32")) {
      if (unsigned == null) unsigned = ENVIRONMENT.createSession(Base64.getDecoder().decode(UNSIGNED));
      try (var signed = tensor(new Tensor("int32", held.shape, held.data))) {
        return (OnnxTensor) unsigned.run(Map.of("x", signed)).get(0);
      }
    }
    var kinds = Map.of("bool", OnnxJavaType.BOOL, "uint8", OnnxJavaType.UINT8, "int8", OnnxJavaType.INT8, "int16", OnnxJavaType.INT16,
        "int32", OnnxJavaType.INT32, "int64", OnnxJavaType.INT64, "float16", OnnxJavaType.FLOAT16, "float32", OnnxJavaType.FLOAT,
        "float64", OnnxJavaType.DOUBLE);
    ByteBuffer direct = ByteBuffer.allocateDirect(held.data.length).order(ByteOrder.nativeOrder()).put(held.data).rewind();
    return OnnxTensor.createTensor(ENVIRONMENT, direct, shape, kinds.get(held.dtype));
  }

  /** An output as its bytes, of the type and shape of `like`, or of what the model says. */
  static Tensor bytes(OrtSession.Result made, Object output, Tensor like) {
    var found = (OnnxTensor) made.get((String) output).orElseThrow();
    ByteBuffer buffer = found.getByteBuffer();
    byte[] data = new byte[buffer.remaining()];
    buffer.get(data);
    if (like != null) return new Tensor(like.dtype, like.shape, data);
    String dtype = found.getInfo().type == OnnxJavaType.FLOAT ? "float32" : found.getInfo().type.toString().toLowerCase();
    return new Tensor(dtype, List.of(), data);
  }

  /** bfloat16 as fp32, of which it is the upper half, and back. */
  static byte[] moved(byte[] data, int from, int to) {
    byte[] found = new byte[data.length / from * to];
    for (int i = 0; i < data.length / from; i++) System.arraycopy(data, i * from + from - 2, found, i * to + to - 2, 2);
    return found;
  }

  static Map<String, Tensor> safetensors(byte[] file) {
    try {
      return tensors(file);
    } catch (IndexOutOfBoundsException | BufferUnderflowException error) {
      throw new IllegalArgumentException("a file of tensors is cut short");
    }
  }

  static Map<String, Tensor> tensors(byte[] file) {
    int start = 8 + (int) ByteBuffer.wrap(file).order(ByteOrder.LITTLE_ENDIAN).getLong(0);
    Map<String, Tensor> found = new LinkedHashMap<>();
    map(new Json(new String(file, 8, start - 8, StandardCharsets.UTF_8)).value()).forEach((name, said) -> {
      if (name.equals("__metadata__")) return;
      var ends = list(map(said).get("data_offsets"));
      int first = start + ((Long) ends.get(0)).intValue(), end = start + ((Long) ends.get(1)).intValue();
      String dtype = type((String) map(said).get("dtype"))[0];
      Objects.checkFromToIndex(first, end, file.length);
      found.put(name, new Tensor(dtype, list(map(said).get("shape")), Arrays.copyOfRange(file, first, end)));
    });
    return found;
  }

  // -- files and what they have to be ----------------------------------------------------------------------------
  static void expect(Object found, Object wanted, String what) {
    if (!found.equals(wanted)) throw new IllegalArgumentException(what + " is " + found + "; expected " + wanted);
  }

  static Tensor fitting(Tensor found, Map<String, Object> said, String what) {
    String kind = found == null ? "missing" : found.dtype + " " + found.shape;
    expect(kind, said.get("dtype") + " " + said.get("shape"), what + " '" + said.get("name") + "'");
    return found;
  }

  static byte[] checked(Path path, Map<String, Object> said) throws Exception {
    if (!Files.isRegularFile(path)) throw new IOException("there is no file '" + path + "'");
    byte[] data = Files.readAllBytes(path);
    expect(sha256(data), said.get("sha256"), "the SHA-256 of '" + path + "'");
    return data;
  }

  static String sha256(byte[] data) throws Exception {
    return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(data));
  }

  static Object parsed(Path path) throws IOException {
    if (!Files.isRegularFile(path)) throw new IOException("there is no file '" + path + "'");
    try {
      return new Json(Files.readString(path)).value();
    } catch (IndexOutOfBoundsException | NumberFormatException error) {
      throw new IOException("'" + path + "' is no JSON, or cut short");
    }
  }

  // -- JSON: maps, lists, strings, Long, Double, Boolean and null -----------------------------------------------
  @SuppressWarnings("unchecked")
  static Map<String, Object> map(Object value) {
    return (Map<String, Object>) value;
  }

  @SuppressWarnings("unchecked")
  static List<Object> list(Object value) {
    return (List<Object>) value;
  }

  static List<Map<String, Object>> maps(Object value) {
    return list(value).stream().map(Train::map).toList();
  }

  static final class Json {
    final String text;
    int at;

    Json(String text) {
      this.text = text;
    }

    static String quoted(String value) {
      var found = new StringBuilder("\"");
      for (char c : value.toCharArray()) {
        if (c < ' ') found.append(String.format("\\u%04x", (int) c));
        else found.append(c == '"' || c == '\\' ? "\\" : "").append(c);
      }
      return found.append('"').toString();
    }

    char next() {
      while (Character.isWhitespace(text.charAt(at))) at++;
      return text.charAt(at);
    }

    boolean skip(char c) {
      if (next() != c) return false;
      at++;
      return true;
    }

    Object value() {
      char c = next();
      if (c == '"') return string();
      if (c == '{') {
        Map<String, Object> found = new LinkedHashMap<>();
        for (at++; !skip('}'); skip(',')) {
          next();
          String name = string();
          skip(':');
          found.put(name, value());
        }
        return found;
      }
      if (c == '[') {
        List<Object> found = new ArrayList<>();
        for (at++; !skip(']'); skip(',')) found.add(value());
        return found;
      }
      int first = at;
      while (at < text.length() && ",]} \n\r\t".indexOf(text.charAt(at)) < 0) at++;
      String word = text.substring(first, at);
      if (word.equals("null")) return null;
      if (word.equals("true") || word.equals("false")) return word.equals("true");
      if (word.matches("-?\\d+")) return Long.valueOf(word);
      return Double.valueOf(word);
    }

    String string() {
      var found = new StringBuilder();
      for (at++; text.charAt(at) != '"'; at++) {
        char c = text.charAt(at);
        if (c == '\\') {
          c = text.charAt(++at);
          int plain = "nrtbf".indexOf(c);
          if (c == 'u') {
            c = (char) Integer.parseInt(text.substring(at + 1, at + 5), 16);
            at += 4;
          } else if (plain >= 0) {
            c = "\n\r\t\b\f".charAt(plain);
          }
        }
        found.append(c);
      }
      at++;
      return found.toString();
    }
  }
}
