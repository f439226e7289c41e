//! The verifier passes packages of coremltools and finds the one fault of a damaged program.

use anemoe_mlpackage::mil::builder::{Arg, BuiltFunction, ConvParams, FunctionBuilder, Var, model};
use anemoe_mlpackage::mil::verify::{Severity, verify};
use anemoe_mlpackage::mil::{Argument, Binding, DataType, MlModel, Opset, TensorType, Value, ValueType};
use anemoe_mlpackage::package::Package;
use anemoe_mlpackage::spec;
use half::f16;
use std::path::{Path, PathBuf};

fn interop() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/interop");
    let mut packages: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .map(|p| p.join(p.file_name().unwrap()).with_extension("mlpackage"))
        .collect();
    packages.sort();
    assert_eq!(packages.len(), 26);
    packages
}

#[test]
fn packages_of_coremltools_have_no_error() {
    let mut problems = Vec::new();
    for path in interop() {
        let package = Package::open(&path).unwrap();
        let errors = verify(package.model()).into_iter().filter(|f| f.severity == Severity::Error);
        problems.extend(errors.map(|f| format!("{}: {f}", path.display())));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn packages_of_coremltools_survive_writing() {
    for path in interop() {
        let package = Package::open(&path).unwrap();
        let bytes = spec::encode(package.model()).unwrap();
        assert_eq!(&spec::decode(&bytes, &path).unwrap(), package.model(), "{}", path.display());
        assert_eq!(spec::encode(package.model()).unwrap(), bytes);
    }
}

fn fp16(dims: &[u64]) -> TensorType {
    TensorType::fixed(DataType::Float16, dims)
}

/// Makes a function with a convolution, LUT weights, a state and a few more ops.
fn function() -> BuiltFunction {
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", fp16(&[1, 4, 1, 2])).unwrap();
    let state = f.state("s", fp16(&[1, 4, 1, 2])).unwrap();
    let indices = Value::bytes(DataType::UInt4, &[8, 4, 1, 1], vec![0x21; 16]);
    let lut = Value::fp16_tensor(&[2, 1, 1, 1, 16, 1], &[f16::ONE; 32]);
    let w = f.constexpr_lut_to_dense("w", indices, lut).unwrap();
    let y = f.conv("y", &x, &w, None, ConvParams::default()).unwrap();
    let parts = f.split("part", &y, 2, 1).unwrap();
    let old = f.read_state("old", &state).unwrap();
    let sum = f.add("sum", &parts[0], &old).unwrap();
    f.write_state(&state, &sum).unwrap();
    let out = f.mul("out", &sum, &parts[1]).unwrap();
    f.output(&out).unwrap();
    f.finish().unwrap()
}

fn sample() -> MlModel {
    model(Opset::CoreML8, vec![("main".into(), function())], "main").unwrap()
}

#[test]
fn what_the_builder_makes_is_legal() {
    assert_eq!(verify(&sample()), []);
    assert_eq!(spec::decode(&spec::encode(&sample()).unwrap(), Path::new("m")).unwrap(), sample());
    let two = model(Opset::CoreML8, vec![("a".into(), function()), ("b".into(), function())], "b").unwrap();
    assert_eq!(verify(&two), []);
    assert_eq!(spec::decode(&spec::encode(&two).unwrap(), Path::new("m")).unwrap(), two);
}

/// Checks that the changed sample gives an error with this text.
fn refused(says: &str, change: impl FnOnce(&mut MlModel)) {
    let mut m = sample();
    change(&mut m);
    let findings = verify(&m);
    let text: Vec<String> = findings.iter().map(|f| f.to_string()).collect();
    assert!(
        findings.iter().any(|f| f.severity == Severity::Error && f.text.contains(says)),
        "no error says `{says}`: {text:?}"
    );
}

fn op<'a>(m: &'a mut MlModel, name: &str) -> &'a mut anemoe_mlpackage::mil::Operation {
    let ops = &mut m.program.functions.get_mut("main").unwrap().block.operations;
    ops.iter_mut().find(|op| op.outputs.first().is_some_and(|o| o.name == name)).unwrap()
}

#[test]
fn wrong_programs_are_refused() {
    refused("is not a name", |m| op(m, "sum").outputs[0].name = "1sum".into());
    refused("reserved word", |m| op(m, "out").outputs[0].name = "tensor".into());
    refused("used twice", |m| op(m, "out").outputs[0].name = "sum".into());
    refused("before it is defined", |m| {
        op(m, "sum").inputs.insert("x".into(), Argument(vec![Binding::Name("out".into())]));
    });
    refused("before it is defined", |m| {
        m.program.functions.get_mut("main").unwrap().block.operations.swap(0, 10)
    });
    refused("required parameter `weight`", |m| drop(op(m, "y").inputs.remove("weight")));
    refused("no parameter `speed`", |m| {
        op(m, "y").inputs.insert("speed".into(), Argument(vec![Binding::Value(Value::int32(1))]));
    });
    refused("declared as", |m| op(m, "y").outputs[0].ty = ValueType::Tensor(fp16(&[1, 8, 1, 3])));
    refused("declared as", |m| {
        op(m, "y").outputs[0].ty = ValueType::Tensor(TensorType::fixed(DataType::Float32, &[1, 8, 1, 2]));
    });
    refused("needs CoreML8", |m| m.program.functions.get_mut("main").unwrap().opset = Opset::CoreML7);
    refused("for a program that needs", |m| m.specification_version = 8);
    refused("entries for 4-bit indices", |m| {
        let lut = Value::fp16_tensor(&[2, 1, 1, 1, 8, 1], &[f16::ONE; 16]);
        op(m, "w").inputs.insert("lut".into(), Argument(vec![Binding::Value(lut)]));
    });
    refused("groups on axis 0", |m| {
        let lut = Value::fp16_tensor(&[3, 1, 1, 1, 16, 1], &[f16::ONE; 48]);
        op(m, "w").inputs.insert("lut".into(), Argument(vec![Binding::Value(lut)]));
    });
    refused("wrong place", |m| {
        let inputs = std::mem::take(&mut op(m, "w").inputs);
        for (name, Argument(bindings)) in inputs {
            if let Some(Binding::Value(v)) = bindings.into_iter().next() {
                op(m, "w").attributes.insert(name, v);
            }
        }
    });
    refused("described as", |m| m.functions[0].inputs[0].dtype = DataType::Float32);
    refused("not an input", |m| m.functions[0].inputs[0].name = "z".into());
    refused("leaves out", |m| m.functions[0].states.clear());
    refused("the function gives", |m| m.functions[0].outputs.clear());
    refused("no operation makes", |m| {
        m.program.functions.get_mut("main").unwrap().block.outputs = vec!["x".into()]
    });
    refused("only fp16", |m| {
        let dims = [1, 4, 1, 2];
        let f = m.program.functions.get_mut("main").unwrap();
        f.inputs[1].ty = ValueType::State(TensorType::fixed(DataType::Float32, &dims));
    });
    refused("is not a function", |m| m.default_function = "other".into());
}

#[test]
fn the_builder_refuses_what_cannot_be() {
    let mut f = FunctionBuilder::new(Opset::CoreML6);
    let x = f.input("x", fp16(&[1, 4, 1, 2])).unwrap();
    assert!(f.input("x", fp16(&[1])).unwrap_err().to_string().contains("twice"));
    assert!(f.state("s", fp16(&[1])).is_err());
    assert!(
        f.op("no_such_op", "a", vec![("x", Arg::from(&x))]).unwrap_err().to_string().contains("no_such_op")
    );
    assert!(f.op("relu", "b", vec![("y", Arg::from(&x))]).unwrap_err().to_string().contains("`y`"));
    assert!(f.reshape("c", &x, &[3, 3]).unwrap_err().to_string().contains("8 elements"));
    let y = f.input("y", fp16(&[1, 3, 1, 2])).unwrap();
    assert!(f.add("d", &x, &y).unwrap_err().to_string().contains("broadcast"));
    assert!(f.input_ranged("r", DataType::Float16, &[5], &[(1, 4)]).is_err());
    assert!(f.finish().unwrap_err().to_string().contains("without outputs"));
}

#[test]
fn text_shows_constants_where_they_are_used() {
    let text = anemoe_mlpackage::mil::text::program(&sample().program);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "func main<CoreML8>(tensor<fp16, [1, 4, 1, 2]> x, state<tensor<fp16, [1, 4, 1, 2]>> s) {"
    );
    assert!(
        lines.iter().any(|l| l.contains("tensor<fp16, [1, 8, 1, 2]> y = conv(") && l.contains("groups = 1")),
        "{text}"
    );
    assert!(lines.iter().any(|l| l.contains("write_state(data = sum, input = s)")), "{text}");
    assert!(
        lines.iter().any(|l| l.contains("tensor<fp16, [1, 4, 1, 2]> part_0, ") && l.contains("split(")),
        "{text}"
    );
    assert_eq!(lines[lines.len() - 2].trim(), "-> (out)");
    assert!(!text.contains(" const("));
}

/// Builds other ops of the table by name. Control flow, which has blocks, can only be read.
#[test]
fn other_ops_are_built_with_their_types() {
    /// Builds an op and returns the shape of its last result.
    macro_rules! shape {
        ($f:ident.$op:ident($($param:ident = $value:expr),*)) => {{
            let name = stringify!($op);
            let args = vec![$((stringify!($param), Arg::from($value))),*];
            $f.op(name, &format!("{name}_0"), args).map(|results| {
                let dims = results.last().unwrap().dims().iter();
                dims.map(|d| d.fixed().unwrap()).collect::<Vec<_>>()
            })
        }};
    }
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", fp16(&[1, 4, 6, 6])).unwrap();
    let i = f.input("i", TensorType::fixed(DataType::Int32, &[3])).unwrap();
    let one = f.constant("one", Value::fp16(f16::ONE)).unwrap();
    let ints = |v: &[i32]| Value::int32s(v);
    assert_eq!(shape!(f.depth_to_space(x = &x, block_size = 2)).unwrap(), [1, 1, 12, 12]);
    assert_eq!(shape!(f.sliding_windows(x = &x, axis = 3, size = 3, stride = 2)).unwrap(), [1, 4, 6, 2, 3]);
    let one_hot = shape!(f.one_hot(indices = &i, on_value = &one, off_value = &one, one_hot_vector_size = 5));
    assert_eq!(one_hot.unwrap(), [3, 5]);
    assert_eq!(shape!(f.gather(x = &x, indices = &i, axis = 1)).unwrap(), [1, 3, 6, 6]);
    let both: &[&Var] = &[&x, &x];
    assert_eq!(shape!(f.einsum(values = both, equation = "nchw,nchv->ncwv")).unwrap(), [1, 4, 6, 6]);
    let cropped = shape!(f.crop(x = &x, crop_height = ints(&[1, 2]), crop_width = ints(&[0, 1])));
    assert_eq!(cropped.unwrap(), [1, 4, 3, 5]);
    let batches = shape!(f.space_to_batch(x = &x, block_shape = ints(&[2, 3]), paddings = ints(&[0; 4])));
    assert_eq!(batches.unwrap(), [6, 4, 3, 2]);
    assert_eq!(shape!(f.fill(shape = ints(&[2, 2]), value = Value::fp16(f16::ONE))).unwrap(), [2, 2]);
    let upsampled =
        shape!(f.upsample_nearest_neighbor(x = &x, scale_factor_height = 2, scale_factor_width = 3));
    assert_eq!(upsampled.unwrap(), [1, 4, 12, 18]);
    let resized = shape!(f.resize_bilinear(x = &x, target_size_height = 3, target_size_width = 9));
    assert_eq!(resized.unwrap(), [1, 4, 3, 9]);
    let w = f.constant("w", Value::fp16_tensor(&[4, 2, 2, 2], &[f16::ONE; 32])).unwrap();
    let transposed = shape!(f.conv_transpose(x = &x, weight = &w, strides = ints(&[2, 2])));
    assert_eq!(transposed.unwrap(), [1, 2, 12, 12]);
    assert_eq!(shape!(f.topk(x = &x, k = 3, axis = 2)).unwrap(), [1, 4, 3, 6]);
    let flat = f.single("flatten2d", "flat", vec![("x", (&x).into()), ("axis", 2.into())]).unwrap();
    let like: &[&Var] = &[&x];
    let mask = Value::bools(&[true]);
    let back = shape!(f.reshape_like(
        x = &flat,
        ref_tensors = like,
        begins = ints(&[0]),
        ends = ints(&[0]),
        end_masks = mask
    ));
    assert_eq!(back.unwrap(), [1, 4, 6, 6]);
    assert!(shape!(f.scatter(data = &x, indices = &i, updates = &x, axis = 1)).is_ok());
    let refused = shape!(f.resize_nearest_neighbor(x = &i, target_size_height = 1, target_size_width = 1));
    assert!(refused.is_err());
}

/// Infers the results of recurrent ops, images, boxes and random numbers, and refuses operands that do not fit.
#[test]
fn sequences_and_images_have_their_types() {
    let mut f = FunctionBuilder::new(Opset::CoreML7);
    let [x, h, wide] = [("x", [5, 2, 3].as_slice()), ("h", &[2, 4]), ("wide", &[2, 8])]
        .map(|(name, shape)| f.input(name, fp16(shape)).unwrap());
    let weight = |f: &mut FunctionBuilder, name: &str, shape: &[u64]| {
        let n = shape.iter().product::<u64>() as usize;
        f.constant(name, Value::fp16_tensor(shape, &vec![f16::ONE; n])).unwrap()
    };
    let (input, hidden) = (weight(&mut f, "wi", &[16, 3]), weight(&mut f, "wh", &[16, 4]));
    let lstm = |h: &Var, way: &str| {
        let mut args = vec![("x", Arg::from(&x)), ("initial_h", h.into()), ("initial_c", h.into())];
        args.extend([("weight_ih", (&input).into()), ("weight_hh", (&hidden).into())]);
        if way == "bidirectional" {
            args.extend([("weight_ih_back", (&input).into()), ("weight_hh_back", (&hidden).into())]);
        }
        args.extend([("direction", way.into()), ("output_sequence", true.into())]);
        args
    };
    let shapes = |results: Vec<Var>| -> Vec<String> {
        results
            .iter()
            .map(|v| format!("{:?}", v.dims().iter().map(|d| d.fixed()).collect::<Option<Vec<_>>>()))
            .collect()
    };
    let found = f.op("lstm", "a", lstm(&h, "forward")).map(shapes).unwrap();
    assert_eq!(found, ["Some([5, 2, 4])", "Some([2, 4])", "Some([2, 4])"]);
    let found = f.op("lstm", "b", lstm(&wide, "bidirectional")).map(shapes).unwrap();
    assert_eq!(found, ["Some([5, 2, 8])", "Some([2, 8])", "Some([2, 8])"]);
    let refused = |result: anemoe_mlpackage::Result<Vec<Var>>| result.unwrap_err().to_string();
    let what = refused(f.op("lstm", "c", lstm(&wide, "forward")));
    assert!(what.contains("`initial_h` is tensor<fp16, [2, 8]>, expected tensor<fp16, [2, 4]>"), "{what}");
    assert!(refused(f.op("lstm", "d", lstm(&h, "sideways"))).contains("sideways"));

    let image = f.input("image", fp16(&[2, 3, 5, 6])).unwrap();
    let places = f.input("places", fp16(&[2, 4, 7, 2])).unwrap();
    let sampled = |at: &Var, mode: &str| {
        let texts =
            [("sampling_mode", mode), ("padding_mode", "border"), ("coordinates_mode", "unnormalized")];
        let mut args = vec![("x", Arg::from(&image)), ("coordinates", at.into())];
        args.extend(texts.map(|(name, text)| (name, Arg::from(text))));
        args.extend([("padding_value", Value::fp16(f16::ONE).into()), ("align_corners", false.into())]);
        args
    };
    let found = f.op("resample", "e", sampled(&places, "nearest")).map(shapes).unwrap();
    assert_eq!(found, ["Some([2, 3, 4, 7])"]);
    assert!(
        refused(f.op("resample", "g", sampled(&places, "cubic")))
            .contains("`cubic` is none of bilinear, nearest")
    );
    assert!(refused(f.op("resample", "i", sampled(&image, "nearest"))).contains("coordinates of type"));
    let resized = |shape: &[i32], axes: u32| {
        let axes = Value::bytes(DataType::UInt32, &[], axes.to_le_bytes().to_vec());
        vec![("x", Arg::from(&image)), ("shape", shape.into()), ("resized_dims", axes.into())]
    };
    assert_eq!(f.op("resize", "j", resized(&[1, 9, 0], 2)).map(shapes).unwrap(), ["Some([2, 3, 9, 6])"]);
    assert!(refused(f.op("resize", "k", resized(&[9], 2))).contains("2 resized_dims of a shape of length 1"));

    // coremltools writes this factor as uint32.
    let pixels = f.input("pixels", fp16(&[1, 2, 4, 6])).unwrap();
    let factor = Value::bytes(DataType::UInt32, &[], 2u32.to_le_bytes().to_vec());
    let apart = vec![("x", Arg::from(&pixels)), ("downscale_factor", factor.into())];
    assert_eq!(f.op("pixel_unshuffle", "o", apart).map(shapes).unwrap(), ["Some([1, 8, 2, 3])"]);

    let (boxes, scores) =
        (f.input("boxes", fp16(&[2, 4, 9])).unwrap(), f.input("scores", fp16(&[2, 3, 9])).unwrap());
    let best = |boxes: &Var| {
        let threshold: Arg = Value::fp16(f16::ONE).into();
        vec![
            ("boxes", Arg::from(boxes)),
            ("scores", (&scores).into()),
            ("iou_threshold", threshold),
            ("max_boxes", 5.into()),
        ]
    };
    let found = f.op("non_maximum_suppression", "l", best(&boxes)).map(shapes).unwrap();
    assert_eq!(found, ["Some([2, 4, 5])", "Some([2, 3, 5])", "Some([2, 5])"]);
    assert!(refused(f.op("non_maximum_suppression", "m", best(&scores))).contains("boxes of type"));
    let drawn = vec![("shape", Arg::from([2, 3].as_slice())), ("seed", 1.into())];
    assert_eq!(f.op("random_uniform", "n", drawn).map(shapes).unwrap(), ["Some([2, 3])"]);
}
