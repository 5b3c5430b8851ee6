// Train FOLDER BATCHES STEPS TO [FROM]: trains with an exported step, as bare.py does (docs/exported_steps.md).
//
//     dotnet run -- FOLDER BATCHES STEPS TO            in a project with Microsoft.ML.OnnxRuntime of NuGet
//
// C# 7.3 and that package are all that it needs, so Mono and Unity compile it too; JSON is the little that is read here.

using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Security.Cryptography;
using System.Text;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;
using Map = System.Collections.Generic.Dictionary<string, object>;

/// <summary>A tensor as its bytes, little-endian.</summary>
public sealed class Tensor
{
    public readonly string Dtype;
    public readonly long[] Shape;
    public readonly byte[] Data;

    public Tensor(string dtype, long[] shape, byte[] data)
    {
        Dtype = dtype;
        Shape = shape;
        Data = data;
    }

    public string Kind => Dtype + " [" + string.Join(", ", Shape) + "]";

    /// <summary>The batch of a step.</summary>
    public Tensor Part(long step)
    {
        if (Shape.Length == 0 || Shape[0] == 0) throw new InvalidDataException($"a feed of {Kind} has no batches");
        var size = Data.Length / (int)Shape[0];
        return new Tensor(Dtype, Shape.Skip(1).ToArray(), Train.Cut(Data, (int)(step % Shape[0]) * size, size));
    }
}

/// <summary>An exported step with its state.</summary>
public sealed class Train
{
    static readonly Dictionary<string, (string Code, TensorElementType Type)> Types =
        new Dictionary<string, (string, TensorElementType)>
        {
            ["bool"] = ("BOOL", TensorElementType.Bool), ["uint8"] = ("U8", TensorElementType.UInt8),
            ["int8"] = ("I8", TensorElementType.Int8), ["uint16"] = ("U16", TensorElementType.UInt16),
            ["int16"] = ("I16", TensorElementType.Int16), ["uint32"] = ("U32", TensorElementType.UInt32),
            ["int32"] = ("I32", TensorElementType.Int32), ["uint64"] = ("U64", TensorElementType.UInt64),
            ["int64"] = ("I64", TensorElementType.Int64), ["float16"] = ("F16", TensorElementType.Float16),
            ["bfloat16"] = ("BF16", TensorElementType.BFloat16), ["float32"] = ("F32", TensorElementType.Float),
            ["float64"] = ("F64", TensorElementType.Double),
        };

    readonly Map said, models;
    readonly Dictionary<string, InferenceSession> sessions = new Dictionary<string, InferenceSession>();
    readonly Dictionary<string, Tensor> state = new Dictionary<string, Tensor>();

    public long Number { get; private set; }

    public Train(string folder, string checkpoint)
    {
        said = Parsed(Path.Combine(folder, "manifest.json"));
        Expect($"{said["format"]} version {said["version"]}", "amp_transpiler.training_step version 1", $"what '{folder}' holds");
        var found = string.Join(", ", Each(said, "places").Select(one => (string)one["place"]));
        var place = Each(said, "places").FirstOrDefault(one => (string)one["place"] == "cpu");
        if (place == null) throw new InvalidDataException($"'{folder}' has a step for {found}; this runs those for cpu");
        models = Of(place, "models");
        foreach (var file in Of(said, "files").Concat(Of(place, "files"))) Checked(Path.Combine(folder, file.Key), (Map)file.Value);
        foreach (var model in models)
        {
            var options = new SessionOptions();
            options.AddSessionConfigEntry("session.disable_quant_qdq", "1");  // what is fake-quantised trains as it is
            sessions[model.Key] = new InferenceSession(Path.Combine(folder, (string)((Map)model.Value)["file"]), options);
        }
        var meta = Parsed(Path.Combine(checkpoint, "meta.json"));
        Expect((string)Of(meta, "program")["fingerprint"], (string)Of(said, "program")["fingerprint"], $"the program of checkpoint '{checkpoint}'");
        var tensors = Of(meta, "file");
        var held = Safetensors(Checked(Path.Combine(checkpoint, (string)tensors["name"]), tensors));
        foreach (var one in Each(said, "states"))
        {
            var stored = Fitting(held, one, "state");
            var same = (string)one["carried"] == stored.Dtype;
            state[(string)one["name"]] = same ? stored : new Tensor("float32", stored.Shape, Moved(stored.Data, 2, 4));
        }
        Number = (long?)meta["step"] ?? 0;
    }

    /// <summary>Run a model of the folder; gives what it fetches, by name, and replaces the state that it updates.</summary>
    public Map Run(string name, IReadOnlyDictionary<string, Tensor> feeds)
    {
        var model = Of(models, name);
        var inputs = new Dictionary<string, Tensor>();
        foreach (var feed in Each(model, "feeds")) inputs[(string)feed["input"]] = Fitting(feeds, feed, "feed");
        foreach (string zero in (List<object>)model["zeros"]) inputs[zero] = new Tensor("float32", new long[0], new byte[4]);
        foreach (var one in Of(model, "states")) inputs[(string)one.Value] = state[one.Key];
        var fetches = Each(model, "fetches").ToList();
        var updates = Of(model, "updates");
        var outputs = fetches.Select(one => one["output"]).Concat(updates.Values).Cast<string>().Distinct().ToList();
        var given = inputs.Values.Select(Value).ToList();
        try
        {
            using (var options = new RunOptions())
            using (var made = sessions[name].Run(options, inputs.Keys, given, outputs))
            {
                Func<object, byte[]> bytes = output => made[outputs.IndexOf((string)output)].GetTensorMutableRawData().ToArray();
                foreach (var one in updates) state[one.Key] = new Tensor(state[one.Key].Dtype, state[one.Key].Shape, bytes(one.Value));
                return fetches.ToDictionary(
                    one => (string)one["name"],
                    one => (object)new Tensor((string)one["dtype"], new long[0], bytes(one["output"])));
            }
        }
        finally
        {
            given.ForEach(one => one.Dispose());
        }
    }

    /// <summary>One step on a batch.</summary>
    public Map Step(IReadOnlyDictionary<string, Tensor> feeds)
    {
        var window = Of(said, "window");
        var counter = (string)window["counter"];
        var count = counter == null ? 1 : BitConverter.ToInt32(state[counter].Data, 0) + 1;
        Number += 1;
        return Run(count == (long)window["steps"] ? "train" : "accumulate", feeds);
    }

    public void Save(string folder)
    {
        var checkpoint = Of(said, "checkpoint");
        var format = (string)Of(checkpoint, "metadata")["format"];
        var header = new StringBuilder("{\"__metadata__\":{\"format\":\"" + format + "\"}");
        var data = new MemoryStream();
        foreach (var one in Each(said, "states"))
        {
            var (held, dtype, first) = (state[(string)one["name"]], (string)one["dtype"], data.Length);
            var content = dtype == held.Dtype ? held.Data : Moved(held.Data, 4, 2);
            data.Write(content, 0, content.Length);
            header.Append($",{Json.Quoted((string)one["name"])}:{{\"dtype\":\"{Types[dtype].Code}\",\"shape\":[{string.Join(",", held.Shape)}],");
            header.Append($"\"data_offsets\":[{first},{data.Length}]}}");
        }
        var text = Encoding.UTF8.GetBytes(header.Append('}').ToString());
        var padded = text.Concat(Enumerable.Repeat((byte)' ', (8 - text.Length % 8) % 8)).ToArray();
        var file = BitConverter.GetBytes((long)padded.Length).Concat(padded).Concat(data.ToArray()).ToArray();
        var meta = ((string)checkpoint["meta"]).Replace("${step}", $"{Number}").Replace("${bytes}", $"{file.Length}")
            .Replace("${sha256}", Sha256(file)).Replace("${runner}", "Train.cs");
        var part = folder + ".part"; // until it is whole
        Directory.CreateDirectory(part);
        File.WriteAllBytes(Path.Combine(part, "state.safetensors"), file);
        var checksum = Sha256(Encoding.UTF8.GetBytes(meta));
        var whole = meta.Substring(0, meta.Length - 1) + ",\"checksum\":\"" + checksum + "\"}";
        File.WriteAllBytes(Path.Combine(part, "meta.json"), Encoding.UTF8.GetBytes(whole));
        Directory.Move(part, folder);
    }

    public static Dictionary<string, Tensor> Safetensors(byte[] file)
    {
        try
        {
            return Tensors(file);
        }
        catch (Exception error) when (error is ArgumentException || error is IndexOutOfRangeException)
        {
            throw new InvalidDataException("a file of tensors is cut short");
        }
    }

    static Dictionary<string, Tensor> Tensors(byte[] file)
    {
        var start = 8 + (int)BitConverter.ToInt64(file, 0);
        var found = new Dictionary<string, Tensor>();
        foreach (var one in (Map)new Json(Encoding.UTF8.GetString(file, 8, start - 8)).Value())
        {
            if (one.Key == "__metadata__") continue;
            var ends = Sizes((Map)one.Value, "data_offsets");
            var dtype = Types.First(each => each.Value.Code == (string)((Map)one.Value)["dtype"]).Key;
            var data = Cut(file, start + (int)ends[0], (int)(ends[1] - ends[0]));
            found[one.Key] = new Tensor(dtype, Sizes((Map)one.Value, "shape"), data);
        }
        return found;
    }

    public static int Main(string[] words)
    {
        try
        {
            if (words.Length < 4) throw new ArgumentException("usage: Train FOLDER BATCHES STEPS TO [FROM]");
            if (!int.TryParse(words[2], NumberStyles.None, CultureInfo.InvariantCulture, out var left))
                throw new ArgumentException($"STEPS is '{words[2]}'; expected a whole number");
            var to = Path.GetFullPath(words[3]).TrimEnd(Path.DirectorySeparatorChar);
            if (Directory.Exists(to) || File.Exists(to)) throw new IOException($"'{to}' is there already");
            if (!Directory.Exists(Path.GetDirectoryName(to))) throw new IOException($"there is no folder '{Path.GetDirectoryName(to)}'");
            var step = new Train(words[0], words[words.Length > 4 ? 4 : 0]);
            var batches = Safetensors(File.ReadAllBytes(words[1]));
            if (batches.Values.Select(one => one.Shape.FirstOrDefault()).Distinct().Count() > 1)
                throw new ArgumentException($"feeds in '{words[1]}' differ in length");
            for (; left > 0; left--)
            {
                var feeds = batches.ToDictionary(one => one.Key, one => one.Value.Part(step.Number));
                var line = new StringBuilder();
                foreach (var one in step.Step(feeds))
                {
                    var found = (Tensor)one.Value;
                    if (found.Dtype == "float32") line.Append($" {one.Key} ").Append(Shown(BitConverter.ToSingle(found.Data, 0)));
                    if (found.Dtype == "bool") line.Append($" {one.Key} {found.Data[0]}");
                }
                Console.WriteLine($"step {step.Number}{line}");
            }
            step.Save(to);
            return 0;
        }
        catch (Exception error)
        {
            Console.Error.WriteLine($"error: {error.Message}");
            return 1;
        }
    }

    // -- tensors -----------------------------------------------------------------------------------------------
    static OrtValue Value(Tensor held)
    {
        var made = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, Types[held.Dtype].Type, held.Shape);
        held.Data.CopyTo(made.GetTensorMutableRawData());
        return made;
    }

    /// <summary>bfloat16 as fp32, of which it is the upper half, and back.</summary>
    static byte[] Moved(byte[] data, int from, int to)
    {
        var found = new byte[data.Length / from * to];
        for (var i = 0; i < data.Length / from; i++) Array.Copy(data, i * from + from - 2, found, i * to + to - 2, 2);
        return found;
    }

    public static byte[] Cut(byte[] data, int first, int size)
    {
        var found = new byte[size];
        Array.Copy(data, first, found, 0, size);
        return found;
    }

    static string Shown(float value) => value.ToString("G9", CultureInfo.InvariantCulture);

    // -- files and what they have to be ------------------------------------------------------------------------
    static Tensor Fitting(IReadOnlyDictionary<string, Tensor> held, Map one, string what)
    {
        var wanted = new Tensor((string)one["dtype"], Sizes(one, "shape"), null).Kind;
        Expect(held.TryGetValue((string)one["name"], out var found) ? found.Kind : "missing", wanted, $"{what} '{one["name"]}'");
        return found;
    }

    static byte[] Checked(string path, Map file)
    {
        var data = File.ReadAllBytes(path);
        Expect(Sha256(data), (string)file["sha256"], $"the SHA-256 of '{path}'");
        return data;
    }

    static void Expect(string found, string wanted, string what)
    {
        if (found != wanted) throw new InvalidDataException($"{what} is {found}; expected {wanted}");
    }

    static string Sha256(byte[] data)
    {
        using (var hash = SHA256.Create()) return string.Concat(hash.ComputeHash(data).Select(one => one.ToString("x2")));
    }

    static Map Parsed(string path)
    {
        var text = File.ReadAllText(path);
        try
        {
            return (Map)new Json(text).Value();
        }
        catch (Exception error) when (error is IndexOutOfRangeException || error is FormatException || error is InvalidCastException)
        {
            throw new InvalidDataException($"'{path}' is no JSON, or cut short");
        }
    }

    static Map Of(Map held, string name) => (Map)held[name];

    static IEnumerable<Map> Each(Map held, string name) => ((List<object>)held[name]).Cast<Map>();

    static long[] Sizes(Map held, string name) => ((List<object>)held[name]).Cast<long>().ToArray();
}

/// <summary>JSON: Map, List of objects, string, long, double, bool and null.</summary>
sealed class Json
{
    readonly string text;
    int at;

    public Json(string text)
    {
        this.text = text;
    }

    public static string Quoted(string value)
    {
        var found = value.Select(c => c == '"' || c == '\\' ? "\\" + c : c < ' ' ? $"\\u{(int)c:x4}" : c.ToString());
        return "\"" + string.Concat(found) + "\"";
    }

    public object Value()
    {
        var c = Next();
        if (c == '"') return Quoted();
        if (c == '{')
        {
            var found = new Map();
            for (at++; !Skip('}'); Skip(','))
            {
                Next();
                var name = Quoted();
                Skip(':');
                found[name] = Value();
            }
            return found;
        }
        if (c == '[')
        {
            var found = new List<object>();
            for (at++; !Skip(']'); Skip(',')) found.Add(Value());
            return found;
        }
        var first = at;
        while (at < text.Length && ",]} \n\r\t".IndexOf(text[at]) < 0) at++;
        var word = text.Substring(first, at - first);
        if (word == "null") return null;
        if (word == "true" || word == "false") return word == "true";
        if (long.TryParse(word, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out var whole)) return whole;
        return double.Parse(word, CultureInfo.InvariantCulture);
    }

    char Next()
    {
        while (char.IsWhiteSpace(text[at])) at++;
        return text[at];
    }

    bool Skip(char c)
    {
        if (Next() != c) return false;
        at++;
        return true;
    }

    string Quoted()
    {
        var found = new StringBuilder();
        for (at++; text[at] != '"'; at++)
        {
            var c = text[at];
            if (c == '\\')
            {
                c = text[++at];
                var plain = "nrtbf".IndexOf(c);
                if (plain >= 0) c = "\n\r\t\b\f"[plain];
                if (text[at] == 'u')
                {
                    c = (char)int.Parse(text.Substring(at + 1, 4), NumberStyles.HexNumber);
                    at += 4;
                }
            }
            found.Append(c);
        }
        at++;
        return found.ToString();
    }
}
