//! Compression kinds, importance, `auto` and perplexity, with the built binary.

use crate::common::*;
use anemoe_npz::{Array, read_npz, write_npy, write_npz};
use serde_json::{Value, json as object};

/// Writes weights with a few that are far larger, and returns the path.
fn weight(shape: &[usize]) -> Place {
    let n: usize = shape.iter().product();
    let value = |i: usize| {
        let x = ((i * 7919 + 13) % 2003) as f32 / 2003.0 - 0.5;
        x * x * x * if i.is_multiple_of(301) { 2.0 } else { 0.2 }
    };
    let path = folder().join("w.npy");
    write_npy(&path, &Array::new(shape.to_vec(), (0..n).map(value).collect::<Vec<f32>>()).unwrap()).unwrap();
    path
}

#[test]
fn one_tensor_in_every_kind() {
    let (dir, w) = (folder(), weight(&[64, 96]));
    let original = anemoe_npz::read_npy(&w).unwrap().to_f32();
    let kinds = "fp16 int8-tensor int8-channel int8-channel-asymmetric int4-block mxfp4 lut1 lut3 lut4-uniform lut6-tensor lut8";
    for kind in kinds.split(' ') {
        let figures = json(0, format!("quantize {w} --quant {kind} -o {dir}/{kind}.npz"));
        assert_eq!(figures["weights"], 6144);
        for key in ["seconds", "weights_per_s", "mse", "relative_mse", "cosine", "bytes"] {
            assert!(figures[key].is_number(), "{kind}: {key} in {figures}");
        }
        let arrays = read_npz(&dir.join(format!("{kind}.npz"))).unwrap();
        let decoded = arrays["decoded"].to_f32();
        // Decoded from the parts, by the formats' definitions.
        let (rows, cols) = (64, 96);
        let expected: Vec<f32> = if kind.starts_with("lut") {
            let (lut, indices) = (&arrays["lut"], arrays["indices"].to_f32());
            let [groups, entries] = [lut.shape[0], lut.shape[2]];
            let values = lut.to_f32();
            let entry = |i: usize| i / cols / (rows / groups) * entries + indices[i] as usize;
            (0..rows * cols).map(|i| values[entry(i)]).collect()
        } else if kind.starts_with("int") {
            let (data, scale) = (arrays["data"].to_f32(), arrays["scale"].to_f32());
            let dims = &arrays["scale"].shape;
            let block = |i: usize| i / cols / (rows / dims[0]) * dims[1] + i % cols / (cols / dims[1]);
            let offset = arrays.get("offset").map_or(vec![0.0; scale.len()], |o| o.to_f32());
            let fp16 = |v: f32| half::f16::from_f32(v).to_f32();
            (0..rows * cols).map(|i| fp16(scale[block(i)] * (data[i] - offset[block(i)]))).collect()
        } else if kind == "mxfp4" {
            let [lut, scale, indices] = ["lut", "scale", "indices"].map(|name| arrays[name].to_f32());
            assert_eq!((lut.len(), arrays["scale"].shape.as_slice()), (16, [64, 3].as_slice()));
            assert!(scale.iter().all(|s| s.log2().fract() == 0.0), "{scale:?}");
            (0..rows * cols).map(|i| scale[i / 32] * lut[indices[i] as usize]).collect()
        } else {
            decoded.clone()
        };
        assert_eq!(decoded, expected, "{kind}");
        let mse = original.iter().zip(&decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / 6144.0;
        let said = number(&figures["mse"]);
        assert!((mse - said).abs() <= 0.02 * said + 1e-10, "{kind}: {mse} for {said}");
        passes(format!("quantize {w} --quant {kind} -o {dir}/{kind}.mlpackage"));
        let inspected = json(0, format!("inspect {dir}/{kind}.mlpackage"));
        assert_eq!(inspected["functions"]["main"]["inputs"][0]["name"], "x");
    }
    let tensor = "model.layers.0.self_attn.q_proj.weight";
    let model = fixture("tiny-gemma4-moe-text");
    let figures = json(0, format!("quantize {model}/model.safetensors:{tensor} --quant int8-channel"));
    assert!(figures["tensor"] == tensor && number(&figures["cosine"]) > 0.999, "{figures}");
}

#[test]
fn tensors_that_cannot_be_compressed() {
    let (dir, w) = (folder(), weight(&[64, 96]));
    let array = |name: &str, shape: &[usize], values: Vec<f32>| {
        write_npy(&dir.join(name), &Array::new(shape.to_vec(), values).unwrap()).unwrap();
    };
    let with = |value: f32| (0..4096).map(|i| if i == 77 { value } else { 0.5 }).collect();
    array("nan.npy", &[64, 64], with(f32::NAN));
    array("large.npy", &[64, 64], with(1e30));
    array("scalar.npy", &[], vec![1.0]);
    array("i.npy", &[5], vec![1.0; 5]);
    let model = fixture("tiny-gemma4-moe-text").join("model.safetensors");
    for (options, says) in [
        (format!("{w} --quant lut5"), &["5-bit", "1, 2, 3, 4, 6 or 8"][..]),
        (format!("{w} --quant int3"), &["unknown compression kind `int3`"]),
        (format!("{w} --quant lut3-tensor --target ios16"), &["iOS16", "3-bit"]),
        (format!("{w} --quant lut4 --target ios16"), &["iOS16", "-tensor"]),
        (format!("{w} --quant int4-block --target ios16"), &["iOS16", "4-bit"]),
        (format!("{w} --quant mxfp4 --target ios16"), &["iOS16", "scales per block"]),
        (format!("{w} --op conv"), &["w.npy", "[64, 96]"]),
        (format!("{w} -o out.txt"), &["out.txt", ".mlpackage"]),
        (format!("{w} --group-size 0"), &["--group-size"]),
        (format!("{w} --importance {dir}/i.npy"), &["5 importances for 96 input channels"]),
        ("nothing.npy".into(), &["nothing.npy"]),
        ("nothing.bin".into(), &["F.npy", "F.safetensors"]),
        (model.to_string(), &["name one with :TENSOR"]),
        (format!("{dir}/nan.npy --quant lut4"), &["nan", "element 77 is NaN"]),
        (format!("{dir}/large.npy --quant lut4"), &["large", "does not fit fp16"]),
        (format!("{dir}/scalar.npy"), &["scalar.npy", "[]"]),
    ] {
        refused(format!("quantize {options}"), says);
    }
}

#[test]
fn every_part_has_a_flag_and_every_kind_runs() {
    let golden = fixture("tiny-gemma4-moe/golden.npz");
    let cosine = |bundle: &Place| {
        let (code, out, _) = run(format!("validate {bundle} --golden {golden} --json"));
        assert!(code < 2, "{out}");
        number(&serde_json::from_str::<Value>(&out).unwrap()["min_cosine"])
    };
    let bundle = built(
        "tiny-gemma4-moe",
        "--quant lut8 --attn-quant int8-channel --expert-quant lut6-tensor --mlp-quant int4-block --block-size 16 \
         --router-quant int8-channel-asymmetric --embed-quant int8-channel --tokens 1,4",
    );
    let chain = chain(&bundle);
    let quant = |shard: &Value, part: &str| text(&shard["quant"][part]).to_string();
    let shards = list(&chain["shards"]);
    assert_eq!(quant(&shards[0], "attention"), "int8-channel");
    assert_eq!(quant(&shards[0], "router"), "int8-channel-asymmetric");
    assert_eq!(quant(&shards[1], "experts"), "lut6-tensor");
    assert_eq!(quant(&shards[1], "dense_mlp"), "int4-block g16");
    assert_eq!(quant(shards.last().unwrap(), "head"), "lut8 g32");
    assert_eq!(chain["embedding"]["storage"]["int"]["bits"], 8, "{}", chain["embedding"]);
    assert!(cosine(&bundle) > 0.6);
    // A compressed embedding is close to the plain one. The routers of a random model are random, too, and react to every
    // small change.
    for (kind, least) in [("int8-channel", 0.9), ("lut8", 0.9), ("lut6-tensor", 0.8), ("int4-block", 0.6)] {
        let cosine =
            cosine(&built("tiny-gemma4-moe", &format!("--quant fp16 --embed-quant {kind} --tokens 1")));
        assert!(cosine > least && cosine < 0.999_999, "{kind}: {cosine}");
    }
}

/// Checks that a scale that all experts share is made for the kind's integers: random experts have nearly equal ranges.
#[test]
fn one_scale_for_a_bank_suits_the_bits_of_its_kind() {
    for (kind, least) in [("int8-tensor", 0.9999), ("int4-tensor", 0.98)] {
        for scope in ["matrix", "bank"] {
            let options = format!("--quant {kind} --scale-scope {scope} --tokens 1 --skip-outliers");
            let chain = chain(&built("tiny-gemma4-moe", &options));
            let cosines = list(&chain["shards"]).iter().filter_map(|s| s["min_weight_cosine"].as_f64());
            let found = cosines.fold(1.0, f64::min);
            assert!(found > least && found < 1.0, "{kind} {scope}: {found}");
        }
    }
    let banks = "plan synthetic:gemma4-mini?layers=1 --quant int8-tensor --scale-scope bank";
    ends(0, banks, &["one scale for up to 262,144 weights"]);
    // Groups that do not divide are noted.
    for (options, says) in
        [("--group-size 48", "48 do not divide"), ("--group-size 1 --quant lut8", "stays fp16")]
    {
        let plan = json(0, format!("plan {} {options}", fixture("tiny-gemma4-moe")));
        assert!(plan["notes"].to_string().contains(says), "{plan}");
    }
}

#[test]
fn importance_is_measured_and_used() {
    let (dir, small) = (folder(), small());
    let sample = dir.join("text.txt");
    std::fs::write(&sample, "def main():\n    return the first value of the list\n".repeat(4)).unwrap();
    let found = json(0, format!("calibrate {small} --text {sample} -o {dir}/i.npz"));
    assert_eq!(found["tensors"], 60);
    let arrays = read_npz(&dir.join("i.npz")).unwrap();
    assert_eq!(arrays["layers.0.experts.gate_up_proj"].shape, [16, 256]);
    assert_eq!(arrays["layers.5.self_attn.o_proj.weight"].shape, [512]);
    let options = "--quant lut2 --tokens 1,16 --max-context 64";
    let (plain, weighted) = (built("small", options), dir.join("weighted"));
    build(&small, &weighted, &format!("{options} --importance {dir}/i.npz"));
    let (a, b) = (chain(&plain), chain(&weighted));
    let bytes = |chain: &Value| -> u64 { list(&chain["shards"]).iter().map(|s| count(&s["bytes"])).sum() };
    assert_eq!(bytes(&a), bytes(&b));
    assert_ne!(a["shards"][0]["sha256"], b["shards"][0]["sha256"]);
    assert_eq!(text(&b["importance"]).len(), 64);
    let perplexity = |model: &Place| {
        let out = json(0, format!("perplexity {model} --text {sample} --context 32 --max-tokens 48"));
        assert_eq!(out["tokens"], 48);
        number(&out["perplexity"])
    };
    let [reference, plain, weighted] = [&small, &plain, &weighted].map(perplexity);
    assert!(reference < plain && reference < weighted, "{reference} {plain} {weighted}");
}

#[test]
fn wrong_importance_and_text() {
    let (dir, tiny, small) = (folder(), fixture("tiny-gemma4-moe"), small());
    let array = Array::new(vec![5], vec![1.0f32; 5]).unwrap();
    write_npz(&dir.join("i.npz"), &[("layers.0.self_attn.q_proj.weight".into(), array)]).unwrap();
    refused(format!("build {tiny} -o {dir}/out --importance {dir}/i.npz"), &["i.npz", "shape [5]"]);
    std::fs::write(dir.join("empty.txt"), "").unwrap();
    std::fs::write(dir.join("binary.txt"), [0xff, 0xfe, 0x00]).unwrap();
    for (line, says) in [
        (format!("perplexity {tiny} --text nothing.txt"), &["tokenizer"][..]),
        (format!("perplexity {small} --text nothing.txt"), &["nothing.txt"]),
        (format!("perplexity {small} --text {dir}/empty.txt"), &["empty.txt", "no token"]),
        (format!("calibrate {small} --text {dir}/binary.txt -o {dir}/out"), &["binary.txt"]),
    ] {
        refused(line, says);
    }
    assert!(!dir.join("out").exists());
}

#[test]
fn without_a_kind_the_fewest_bytes_that_a_token_reads_are_searched_for() {
    let planned = |options: &str| json_of(0, &mut anemoe_as_is(format!("plan {options}")));
    let tiny = fixture("tiny-gemma4-moe");
    let [speed, size] = ["", "--objective size --max-kl 0.0025"].map(|goal| {
        let auto = planned(&format!("{tiny} {goal}"))["auto"].clone();
        assert!(
            text(&auto["goal"]).starts_with("max_kl 0.0025") && number(&auto["mean_kl"]) <= 0.0025,
            "{auto}"
        );
        number(&auto["bytes_read_per_token"]) / number(&auto["bytes"])
    });
    assert!(speed <= size, "for speed, bits go into what is read seldom");
    assert!(size < 1.0, "not all experts are read");
    // A model that is too large to be run gets its family's preset, and the reason.
    let large = "synthetic:gemma4-26b-a4b?layers=1";
    let plan = planned(large);
    assert_eq!(plan["options"]["parts"]["attention"], "lut6");
    assert!(text(&plan["notes"][0]).contains("preset, lut4, attention lut6, head lut6: "), "{plan}");
    assert_eq!(planned(&format!("{large} --attn-quant fp16"))["options"]["parts"]["attention"], "fp16");
    // A part with its own kind is left alone.
    let plan = planned(&format!("{tiny} --quant auto --max-bytes 300kB --attn-quant int8-channel"));
    let parts: Vec<&str> = each(&plan["auto"]["tensors"], "part").collect();
    assert!(count(&plan["auto"]["bytes"]) <= 300_000);
    assert!(!parts.contains(&"attention") && parts.contains(&"experts"));
    assert_eq!(plan["shards"][0]["quant"]["attention"], "int8-channel");
}

#[test]
fn auto_keeps_its_goal_and_says_why() {
    let model = copied("tiny-gemma4-moe-text");
    for layer in 0..6 {
        // One outlier in each expert's matrix [64, 64].
        plant(&model, &format!("model.layers.{layer}.experts.gate_up_proj"), 64 * 64, 6.0);
    }
    let auto = json(0, format!("plan {model} --quant auto --min-cosine 0.999"))["auto"].clone();
    assert!(number(&auto["min_cosine"]) >= 0.999 && auto["goal"] == "min_cosine 0.999", "{auto}");
    // No kind for all tensors that reaches the goal is smaller.
    for u in list(&auto["uniform"]).iter().filter(|u| number(&u["min_cosine"]) >= 0.999) {
        assert!(count(&auto["bytes"]) <= count(&u["bytes"]), "{u}");
    }
    assert!(each(&auto["tensors"], "reason").all(|reason| !reason.is_empty()));
    let is_bank = |t: &&Value| text(&t["tensor"]).ends_with("gate_up_proj");
    let experts: Vec<&Value> = list(&auto["tensors"]).iter().filter(is_bank).collect();
    assert!(!experts.is_empty() && experts.iter().all(|t| t["kind"] != "int8-tensor"), "{experts:?}");
    // The build records the choice, which is the plan's.
    let bundle = folder().join("b");
    build(&model, &bundle, "--quant auto --min-cosine 0.999 --tokens 1");
    assert_eq!(chain(&bundle)["auto"], auto);
}

/// Copies the tiny model, with the weights of its experts replaced by `value(block, index)`.
fn with_experts(value: impl Fn(usize, usize) -> f32) -> Place {
    let model = copied("tiny-gemma4-moe-text");
    edit_weights(&model.join("model.safetensors"), |header, data| {
        for (_, info) in header.iter().filter(|(tensor, _)| tensor.contains(".experts.")) {
            let [start, end] = [0, 1].map(|i| count(&info["data_offsets"][i]) as usize);
            for (i, bf16) in data[start..end].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *bf16 = half::bf16::from_f32(value(i / 32, i * 7 % 16)).to_le_bytes();
            }
        }
    });
    model
}

#[test]
fn weights_on_a_lattice_are_noticed_and_kept() {
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mxfp4 = |block: usize, i: usize| {
        let scale = 2f32.powi((block * 13 % 7) as i32 - 9);
        if i < 8 { scale * table[i] } else { -scale * table[i - 8] }
    };
    let q4_0 = |block: usize, i: usize| {
        // Four bits, so that BF16 holds the products.
        let scale = (8 + block * 5 % 8) as f32 / 1024.0;
        (i as f32 - 8.0) * if block.is_multiple_of(2) { scale } else { -scale }
    };
    for (lattice, kind, key, model) in
        [("MXFP4", "mxfp4", "mxfp4", with_experts(mxfp4)), ("Q4_0", "int4-block", "q4_0", with_experts(q4_0))]
    {
        let seen = json(0, format!("inspect {model}"));
        let (sampled, found) = (count(&seen["lattices"]["sampled"]), count(&seen["lattices"][key]));
        assert!(found > 0 && found < sampled, "{}", seen["lattices"]);
        assert!(seen["remarks"].to_string().contains(&format!("the lattice of {lattice}: {kind} keeps")));
        let plan = json(0, format!("plan {model} --quant lut4 --expert-quant {kind}"));
        let notes = plan["notes"].to_string();
        assert!(notes.contains("experts: ") && notes.contains("lut4 per 32 rows would lose"), "{notes}");
        assert_eq!(notes.contains("coremltools #2688"), kind == "mxfp4");
        let tensor = "model.layers.0.experts.down_proj";
        let figures =
            json(0, format!("quantize {model}/model.safetensors:{tensor} --op linear --quant {kind}"));
        let lut4 = json(0, format!("quantize {model}/model.safetensors:{tensor} --op linear --quant lut4"));
        assert_eq!(number(&figures["relative_mse"]), 0.0, "{figures}");
        assert!(number(&lut4["relative_mse"]) > 1e-3, "{lut4}");
        // `auto` takes the kind that keeps them rather than a larger one.
        let auto = json(0, format!("plan {model} --quant auto --max-kl 0.00001"));
        let experts: Vec<_> =
            list(&auto["auto"]["tensors"]).iter().filter(|t| t["part"] == "experts").collect();
        let larger = ["lut6", "lut8", "int8-tensor", "int8-channel"];
        assert!(experts.iter().any(|t| t["kind"] == kind), "{experts:#?}");
        assert!(experts.iter().all(|t| !larger.contains(&text(&t["kind"]))), "{experts:#?}");
    }
    // Scales that fp16 cannot hold are an error, which names the tensor.
    let tiny = with_experts(|_, i| 2f32.powi(-40) * table[i % 8]);
    for command in
        ["build MODEL -o OUT.anemoe --skip-gates", "quantize MODEL/model.safetensors:TENSOR --op linear"]
    {
        let command =
            command.replace("MODEL", &tiny.to_string()).replace("TENSOR", "model.layers.0.experts.down_proj");
        let out = folder().join("none");
        let kind = if command.starts_with("build") { "--expert-quant" } else { "--quant" };
        refused(
            format!("{} {kind} mxfp4", command.replace("OUT", &out.display().to_string())),
            &["experts.", "does not fit fp16", "2^-24"],
        );
    }
}

/// Writes a tokenizer that has a token for each byte and nothing else.
fn write_byte_tokenizer(folder: &Place) {
    let is_shown = |b: &u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let names = (0..256).map(|b| if is_shown(&b) { b } else { others.next().unwrap() });
    let vocab: serde_json::Map<String, Value> =
        names.enumerate().map(|(id, c)| (char::from_u32(c).unwrap().into(), object!(id))).collect();
    let bytes =
        object!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = object!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

#[test]
fn weights_are_rotated_for_a_text() {
    let dir = folder();
    let sample = dir.join("text.txt");
    std::fs::write(&sample, "The sun rises in the east and sets in the west.\n".repeat(30)).unwrap();
    for name in ["tiny-llama", "tiny-qwen2", "tiny-gemma3"] {
        let (tiny, checkpoint, bundle) = (fixture(name), dir.join(name), dir.join("bundle"));
        std::fs::create_dir(&checkpoint).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(tiny.join(file), checkpoint.join(file)).unwrap();
        }
        write_byte_tokenizer(&checkpoint);
        let golden = tiny.join("golden.npz");
        let kinds = "--quant int8-channel --attn-quant lut6 --tokens 1,16 --max-context 64";
        build(&checkpoint, &bundle, &format!("{kinds} --calibrate {sample}"));
        let readings = &chain(&bundle)["readings"];
        assert_eq!(readings["rotation"] == "hadamard", name != "tiny-gemma3", "{name}: {readings}");
        let found = json(
            0,
            format!("validate {bundle} --golden {golden} --checkpoint {checkpoint} --min-cosine 0.9"),
        );
        assert!(count(&found["weights"]["compared"]) > 20, "{name}: {found}");
        let found = json(0, format!("trace {bundle} --golden {golden}"));
        for layer in list(&found["layers"]) {
            assert!(number(&layer["fidelity"]["mean_cosine"]) > 0.95, "{name}: {layer}");
        }
        std::fs::remove_dir_all(&bundle).unwrap();
    }
}
