// dotnet run -- FOLDER BATCHES STEPS TO [FROM]: trains with an exported step, as bare.py does (docs/exported_steps.md).
//
// A sample: Microsoft.ML.OnnxRuntime of NuGet is all that it needs.

using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Security.Cryptography;
using System.Text;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

try
{
    var step = new Step(args[0], args.Length > 4 ? args[4] : args[0]);
    var batches = Step.Safetensors(File.ReadAllBytes(args[1]));
    for (var left = int.Parse(args[2]); left > 0; left--)
    {
        var feeds = batches.ToDictionary(one => one.Key, one => one.Value.Part((int)(step.Number % one.Value.Shape[0])));
        var told = step.Train(feeds).Where(one => one.Value.Dtype is "float32" or "bool").Select(one => one.Value.Dtype == "bool"
            ? $"{one.Key} {one.Value.Data[0]}"
            : FormattableString.Invariant($"{one.Key} {BitConverter.ToSingle(one.Value.Data):G9}"));
        Console.WriteLine($"step {step.Number} {string.Join(' ', told)}");
    }
    step.Save(args[3]);
    return 0;
}
catch (Exception error)
{
    Console.Error.WriteLine($"error: {error.Message}");
    return 1;
}

/// <summary>A tensor as its bytes, little-endian.</summary>
sealed record Tensor(string Dtype, long[] Shape, byte[] Data)
{
    public string Kind => $"{Dtype} [{string.Join(", ", Shape)}]";

    public Tensor Part(int number)
    {
        var size = Data.Length / (int)Shape[0];
        return new Tensor(Dtype, Shape[1..], Data[(number * size)..((number + 1) * size)]);
    }
}

/// <summary>An exported step with its state.</summary>
sealed class Step
{
    static readonly Dictionary<string, (string Code, TensorElementType Type)> Types = new()
    {
        ["bool"] = ("BOOL", TensorElementType.Bool), ["uint8"] = ("U8", TensorElementType.UInt8),
        ["int8"] = ("I8", TensorElementType.Int8), ["uint16"] = ("U16", TensorElementType.UInt16),
        ["int16"] = ("I16", TensorElementType.Int16), ["uint32"] = ("U32", TensorElementType.UInt32),
        ["int32"] = ("I32", TensorElementType.Int32), ["uint64"] = ("U64", TensorElementType.UInt64),
        ["int64"] = ("I64", TensorElementType.Int64), ["float16"] = ("F16", TensorElementType.Float16),
        ["bfloat16"] = ("BF16", TensorElementType.BFloat16), ["float32"] = ("F32", TensorElementType.Float),
        ["float64"] = ("F64", TensorElementType.Double),
    };

    readonly JsonElement said;
    readonly Dictionary<string, InferenceSession> sessions = new();
    readonly Dictionary<string, Tensor> state = new();

    public long Number { get; private set; }

    public Step(string folder, string checkpoint)
    {
        said = Parsed(Path.Combine(folder, "manifest.json"));
        var found = $"{said.GetProperty("format")} version {said.GetProperty("version")}";
        Expect(found, "amp_transpiler.training_step version 1", $"what '{folder}' holds");
        Expect(Text(said, "place"), "cpu", $"the place of '{folder}'");
        foreach (var file in said.GetProperty("files").EnumerateObject()) Checked(Path.Combine(folder, file.Name), file.Value);
        foreach (var model in said.GetProperty("models").EnumerateObject())
            sessions[model.Name] = new InferenceSession(Path.Combine(folder, Text(model.Value, "file")));
        var meta = Parsed(Path.Combine(checkpoint, "meta.json"));
        var (own, other) = (said.GetProperty("program"), meta.GetProperty("program"));
        Expect(Text(other, "fingerprint"), Text(own, "fingerprint"), $"the program of checkpoint '{checkpoint}'");
        var tensors = meta.GetProperty("file");
        var held = Safetensors(Checked(Path.Combine(checkpoint, Text(tensors, "name")), tensors));
        foreach (var one in said.GetProperty("states").EnumerateArray())
        {
            var stored = Fitting(held, one, "state");
            var same = Text(one, "carried") == stored.Dtype;
            state[Text(one, "name")] = same ? stored : new Tensor("float32", stored.Shape, Moved(stored.Data, 2, 4));
        }
        Number = meta.GetProperty("step").ValueKind == JsonValueKind.Null ? 0 : meta.GetProperty("step").GetInt64();
    }

    /// <summary>Run a model of the folder; gives what it fetches, by name, and replaces the state that it updates.</summary>
    public Dictionary<string, Tensor> Run(string name, IReadOnlyDictionary<string, Tensor> feeds)
    {
        var model = said.GetProperty("models").GetProperty(name);
        var inputs = new Dictionary<string, Tensor>();
        foreach (var feed in model.GetProperty("feeds").EnumerateArray()) inputs[Text(feed, "input")] = Fitting(feeds, feed, "feed");
        foreach (var zero in model.GetProperty("zeros").EnumerateArray())
            inputs[zero.GetString()!] = new Tensor("float32", Array.Empty<long>(), new byte[4]);
        foreach (var one in model.GetProperty("states").EnumerateObject()) inputs[one.Value.GetString()!] = state[one.Name];
        var fetches = model.GetProperty("fetches").EnumerateArray().ToList();
        var updates = model.GetProperty("updates").EnumerateObject().ToList();
        var outputs = fetches.Select(one => Text(one, "output")).Concat(updates.Select(one => one.Value.GetString()!)).Distinct().ToList();
        var given = inputs.Values.Select(Value).ToList();
        try
        {
            using var options = new RunOptions();
            using var made = sessions[name].Run(options, inputs.Keys, given, outputs);
            byte[] Bytes(string output) => made[outputs.IndexOf(output)].GetTensorMutableRawData().ToArray();
            foreach (var one in updates) state[one.Name] = state[one.Name] with { Data = Bytes(one.Value.GetString()!) };
            return fetches.ToDictionary(
                one => Text(one, "name"),
                one => new Tensor(Text(one, "dtype"), Array.Empty<long>(), Bytes(Text(one, "output"))));
        }
        finally
        {
            given.ForEach(one => one.Dispose());
        }
    }

    public Dictionary<string, Tensor> Train(IReadOnlyDictionary<string, Tensor> feeds)
    {
        var window = said.GetProperty("window");
        var counter = window.GetProperty("counter").GetString();
        var count = counter is null ? 1 : BitConverter.ToInt32(state[counter].Data) + 1;
        Number += 1;
        return Run(count == window.GetProperty("steps").GetInt32() ? "train" : "accumulate", feeds);
    }

    public void Save(string folder)
    {
        var (header, data) = (new Dictionary<string, object>(), new MemoryStream());
        var checkpoint = said.GetProperty("checkpoint");
        header["__metadata__"] = checkpoint.GetProperty("metadata");
        foreach (var one in said.GetProperty("states").EnumerateArray())
        {
            var (held, dtype, first) = (state[Text(one, "name")], Text(one, "dtype"), data.Length);
            data.Write(dtype == held.Dtype ? held.Data : Moved(held.Data, 4, 2));
            header[Text(one, "name")] = new { dtype = Types[dtype].Code, shape = held.Shape, data_offsets = new[] { first, data.Length } };
        }
        var text = JsonSerializer.SerializeToUtf8Bytes(header);
        var padded = text.Concat(Enumerable.Repeat((byte)' ', (8 - text.Length % 8) % 8)).ToArray();
        var file = BitConverter.GetBytes((long)padded.Length).Concat(padded).Concat(data.ToArray()).ToArray();
        var meta = Text(checkpoint, "meta").Replace("${step}", $"{Number}").Replace("${bytes}", $"{file.Length}")
            .Replace("${sha256}", Sha256(file)).Replace("${runner}", "Train.cs");
        if (Directory.Exists(folder)) throw new IOException($"'{folder}' is there already");
        Directory.CreateDirectory(folder);
        File.WriteAllBytes(Path.Combine(folder, "state.safetensors"), file);
        var checksum = Sha256(Encoding.UTF8.GetBytes(meta));
        File.WriteAllText(Path.Combine(folder, "meta.json"), $"{meta[..^1]},\"checksum\":\"{checksum}\"}}");
    }

    public static Dictionary<string, Tensor> Safetensors(byte[] file)
    {
        var start = 8 + (int)BitConverter.ToInt64(file);
        var found = new Dictionary<string, Tensor>();
        foreach (var one in JsonDocument.Parse(file.AsMemory(8, start - 8)).RootElement.EnumerateObject())
        {
            if (one.Name == "__metadata__") continue;
            var ends = one.Value.GetProperty("data_offsets").EnumerateArray().Select(end => start + end.GetInt32()).ToArray();
            var dtype = Types.First(each => each.Value.Code == Text(one.Value, "dtype")).Key;
            found[one.Name] = new Tensor(dtype, Sizes(one.Value), file[ends[0]..ends[1]]);
        }
        return found;
    }

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

    static Tensor Fitting(IReadOnlyDictionary<string, Tensor> held, JsonElement one, string what)
    {
        var found = held.GetValueOrDefault(Text(one, "name"));
        var wanted = new Tensor(Text(one, "dtype"), Sizes(one), Array.Empty<byte>()).Kind;
        Expect(found?.Kind ?? "missing", wanted, $"{what} '{Text(one, "name")}'");
        return found!;
    }

    static byte[] Checked(string path, JsonElement file)
    {
        var data = File.ReadAllBytes(path);
        Expect(Sha256(data), Text(file, "sha256"), $"the SHA-256 of '{path}'");
        return data;
    }

    static void Expect(string found, string wanted, string what)
    {
        if (found != wanted) throw new InvalidDataException($"{what} is {found}; expected {wanted}");
    }

    static string Sha256(byte[] data) => Convert.ToHexString(SHA256.HashData(data)).ToLowerInvariant();

    static JsonElement Parsed(string path) => JsonDocument.Parse(File.ReadAllBytes(path)).RootElement;

    static long[] Sizes(JsonElement one) => one.GetProperty("shape").EnumerateArray().Select(size => size.GetInt64()).ToArray();

    static string Text(JsonElement one, string name) => one.GetProperty(name).GetString()!;
}
