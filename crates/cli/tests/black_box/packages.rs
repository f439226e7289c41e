//! Packages of other tools: images, labels, defaults, and models that are no ML Programs.

use crate::common::*;
use anemoe_mlpackage::blob::BlobFile;
use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::verify::verify;
use anemoe_mlpackage::mil::{
    Argument, Binding, ColorSpace, DataType, Feature, FeatureKind, FeatureShape, Immediate, MlModel, Opset,
    TensorData, TensorType, Value, ValueData, ValueType,
};
use anemoe_mlpackage::package::{Package, PackageWriter};
use anemoe_mlpackage::spec;
use anemoe_npz::{Array, read_npz, write_npz};
use image::{DynamicImage, GrayImage, ImageFormat, Rgb, RgbImage};
use serde_json::{Value as Json, json as value};
use std::fs;
use std::path::Path;

const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";

fn write(path: &Path, picture: impl Into<DynamicImage>, format: ImageFormat) {
    picture.into().save_with_format(path, format).unwrap();
}

/// Copies the classifier of `tests/packages`, which coremltools 7.2 wrote, and edits its model.
fn colors(edit: impl FnOnce(&mut MlModel)) -> Place {
    let package = folder().join("colors.mlpackage");
    copy(&root("crates/cli/tests/packages/colors.mlpackage"), &package);
    let file = package.join(MODEL);
    let mut model = spec::decode(&fs::read(&file).unwrap(), &file).unwrap();
    edit(&mut model);
    fs::write(&file, spec::encode(&model).unwrap()).unwrap();
    package
}

/// Returns the classes of the first output.
fn classes(package: &Place, inputs: &str) -> Json {
    json(0, format!("predict {package} --inputs {inputs}"))["outputs"][0]["classes"].clone()
}

#[test]
fn a_classifier_names_the_class_of_a_picture() {
    let (dir, package) = (folder(), colors(|_| ()));
    // Fields that were not initialised before coremltools 8: they are there, and mean nothing.
    let bytes = fs::read(package.join(WEIGHTS)).unwrap();
    assert!(bytes[64 + 24..128].iter().any(|b| *b != 0));
    BlobFile::open(&package.join(WEIGHTS)).unwrap();
    let lines = ["image RGB [1, 3, 4, 6]", "classLabel string", "classLabel_probs dictionary of string"];
    ends(0, format!("inspect {package}"), &lines);
    let input = &json(0, format!("inspect {package}"))["functions"]["main"]["inputs"][0];
    has(input, value!({"kind": "image", "color": "RGB"}));
    assert!(run(format!("check {package}")).0 < 2);
    // Another size is scaled, PNG and JPEG are told apart by their contents.
    let picture = dir.join("picture");
    for (color, name, p) in
        [([255, 0, 0], "red", 0.9996), ([0, 0, 255], "blue", 0.9996), ([255, 255, 255], "white", 0.9474)]
    {
        for (size, format) in [((6, 4), ImageFormat::Png), ((40, 30), ImageFormat::Jpeg)] {
            write(&picture, RgbImage::from_pixel(size.0, size.1, Rgb(color)), format);
            let classes = classes(&package, &format!("image={picture}"));
            assert_eq!(classes["classLabel"], name, "{classes}");
            assert!((number(&classes["classLabel_probs"][name]) - p).abs() < 0.001, "{classes}");
        }
    }
    // Gray of 255 is white.
    write(&picture, GrayImage::from_pixel(6, 4, image::Luma([255])), ImageFormat::Png);
    assert_eq!(classes(&package, &format!("image={picture}"))["classLabel"], "white");
    // The only image needs no name, each picture is a step of its own, and arrays have the program's layout or a picture's.
    let (red, npz, out) = (dir.join("red.png"), dir.join("in.npz"), dir.join("out.npz"));
    write(&red, RgbImage::from_pixel(6, 4, Rgb([255, 0, 0])), ImageFormat::Png);
    let shown = passes(format!("predict {package} --inputs {red} {red}"));
    assert_eq!(shown.matches("classLabel: red 0.9996").count(), 2, "{shown}");
    let planes: Vec<u8> = [255u8, 0, 0].iter().flat_map(|&v| [v; 24]).collect();
    for (shape, data) in [(vec![1, 3, 4, 6], planes), (vec![4, 6, 3], [255u8, 0, 0].repeat(24))] {
        write_npz(&npz, &[("image".into(), Array::new(shape, data).unwrap())]).unwrap();
        assert_eq!(classes(&package, &format!("{npz} --outputs {out} --force"))["classLabel"], "red");
        let arrays = read_npz(&out).unwrap();
        assert_eq!((arrays.len(), &arrays["classLabel_probs"].shape[..]), (1, &[4][..]));
    }
    // A package that takes blue first.
    let bgr = colors(|m| m.functions[0].inputs[0].kind = FeatureKind::Image(ColorSpace::Bgr));
    assert_eq!(classes(&bgr, &format!("image={red}"))["classLabel"], "blue");
    let numbered = colors(label_by_numbers);
    let classes = classes(&numbered, &format!("image={red}"));
    assert_eq!(classes["classLabel"], 7);
    assert!(classes["classLabel_probs"]["1099511627776"].is_f64(), "{classes}");
    assert_eq!(verify(Package::open(&numbered).unwrap().model()), []);
    // Weights of packages can be quantized.
    let figures = json(0, format!("quantize {package} --quant int8-channel"));
    has(&figures, value!({"weights": 12, "shape": [4, 3]}));
    refused(format!("quantize {package}:w"), &["no weight `w`"]);
}

/// Replaces the labels of the classifier by numbers.
fn label_by_numbers(m: &mut MlModel) {
    let outputs = m.functions[0].outputs.iter_mut();
    for (feature, kind) in outputs.zip([FeatureKind::Scalar, FeatureKind::Dictionary]) {
        *feature = Feature { kind, ..Feature::array(&*feature.name, DataType::Int64, FeatureShape::Dynamic) };
    }
    let operations = &mut m.program.functions.get_mut("main").unwrap().block.operations;
    let op = operations.iter_mut().find(|op| op.op_type == "classify").unwrap();
    let scalar = ValueType::Tensor(TensorType::scalar(DataType::Int64));
    let immediate = |ty: ValueType, value| Value { ty, data: ValueData::Immediate(value) };
    let number = |n| immediate(scalar.clone(), Immediate::Tensor(TensorData::LongInts(vec![n])));
    let ty = ValueType::List { element: Box::new(scalar.clone()), length: 4.into() };
    let list = immediate(ty, Immediate::List([7, -1, 1 << 40, 9].map(number).into()));
    op.inputs.insert("classes".into(), Argument(vec![Binding::Value(list)]));
    op.outputs[0].ty = scalar.clone();
    let value = Box::new(ValueType::Tensor(TensorType::scalar(DataType::Float64)));
    op.outputs[1].ty = ValueType::Dictionary { key: Box::new(scalar), value };
}

/// Writes a package that adds 100 to an image and a number to it; the number has a default.
fn brighter(color: ColorSpace) -> Place {
    let dims = [1, color.channels(), 2, 3];
    let mut f = FunctionBuilder::new(Opset::CoreML7);
    let x = f.input("x", TensorType::fixed(DataType::Float32, &dims)).unwrap();
    let by = f.input("by", TensorType::fixed(DataType::Float32, &[1])).unwrap();
    let y = f.add("y", &x, &by).unwrap();
    f.output(&y).unwrap();
    let mut model = model(Opset::CoreML7, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    let described = &mut model.functions[0];
    described.inputs[1].default = Some(100.0);
    for image in [&mut described.inputs[0], &mut described.outputs[0]] {
        image.kind = FeatureKind::Image(color);
        if color == ColorSpace::GrayscaleFloat16 {
            image.dtype = DataType::Float16;
        }
    }
    let path = folder().join("brighter.mlpackage");
    PackageWriter::replace(&path).unwrap().finish(&model).unwrap();
    let read = Package::open(&path).unwrap();
    assert_eq!((read.model(), verify(read.model())), (&model, vec![]));
    path
}

#[test]
fn images_come_out_and_defaults_stand_in() {
    let dir = folder();
    let (picture, out) = (dir.join("in.png"), dir.join("out.png"));
    let pixels = vec![0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 250];
    write(&picture, RgbImage::from_raw(3, 2, pixels.clone()).unwrap(), ImageFormat::Png);
    let brighter_pixels: Vec<u8> = pixels.iter().map(|v| v.saturating_add(100)).collect();
    let came_out = || image::open(&out).unwrap().to_rgb8().into_raw();
    for color in [ColorSpace::Rgb, ColorSpace::Bgr] {
        let package = brighter(color);
        passes(format!("predict {package} --inputs {picture} --outputs {out} --force"));
        assert_eq!(came_out(), brighter_pixels, "{color:?}");
    }
    // The default is one input's value, no constant.
    let (package, by) = (brighter(ColorSpace::Rgb), dir.join("by.npy"));
    anemoe_npz::write_npy(&by, &Array::new(vec![1], vec![0f32]).unwrap()).unwrap();
    let predict = format!("predict {package} --outputs {out} --force --inputs by={by}");
    passes(format!("{predict} {picture}"));
    assert_eq!(came_out(), pixels);
    // The path of an input need not be text.
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStringExt;
        let odd = std::ffi::OsString::from_vec(b"\xff=.png".to_vec());
        fs::rename(&picture, dir.join(&odd)).unwrap();
        let mut given = std::ffi::OsString::from("x=");
        given.push(dir.join(&odd).as_os_str());
        assert_eq!(finish(anemoe(predict).arg(given)).0, 0);
        assert_eq!(came_out(), pixels);
    }
    let inspected = json(0, format!("inspect {package}"));
    assert_eq!(inspected["functions"]["main"]["inputs"][1]["default"], 100.0);
    // fp16 gray counts from 0 to 1.
    write(&picture, GrayImage::from_pixel(3, 2, image::Luma([51])), ImageFormat::Png);
    let (gray, npz) = (brighter(ColorSpace::GrayscaleFloat16), dir.join("out.npz"));
    passes(format!("predict {gray} --inputs {picture} --outputs {npz}"));
    let values = read_npz(&npz).unwrap()["y"].to_f32();
    assert!(values.iter().all(|v| (v - 100.2).abs() < 0.1), "{values:?}");

    fs::write(dir.join("no.png"), "no picture").unwrap();
    for (inputs, says) in [
        (String::new(), &["no array `x`", "x, by"][..]),
        ("--inputs z=in.png".into(), &["`z` is not an input", "x, by"]),
        (format!("--inputs by={picture}"), &["`by` is no image"]),
        (format!("--inputs {dir}/no.png"), &["no.png", "PNG and JPEG"]),
    ] {
        refused(format!("predict {package} {inputs}"), says);
    }
}

#[test]
fn other_models_are_refused_by_name() {
    let (package, dir) = (colors(|_| ()), folder());
    let (single, compiled) = (dir.join("single.mlmodel"), dir.join("m.mlmodelc"));
    let commands = ["inspect", "check", "predict", "quantize"];
    // An ML Program by itself is one.
    passes(format!("inspect {package}/{MODEL}"));
    for (number, name) in
        [(500, "a neural network (specification version 4)"), (202, "a pipeline"), (610, "suppression")]
    {
        // A specification of version 4, with an empty message for the kind.
        let other_model = [vec![8, 4], field(number, b"")].concat();
        fs::write(package.join(MODEL), &other_model).unwrap();
        fs::write(&single, other_model).unwrap();
        for (path, command) in [&package, &single].into_iter().flat_map(|path| commands.map(|c| (path, c))) {
            refused(format!("{command} {path}"), &["unsupported", name]);
        }
    }
    fs::create_dir(&compiled).unwrap();
    for command in commands {
        refused(format!("{command} {compiled}"), &["m.mlmodelc", "compiled", ".mlpackage"]);
    }
}

#[test]
fn git_lfs_pointers_are_named_everywhere() {
    let dir = folder();
    let bundle = built("tiny-zaya", "--tokens 1");
    let weights = format!("shards/L00.attn.mlpackage/{WEIGHTS}");
    let predict = format!("predict {} --inputs", root("crates/cli/tests/packages/colors.mlpackage"));
    let package = colors(|_| ());
    let checkpoint = copied("tiny-zaya");
    let bundle_lines =
        [format!("check {bundle} --no-journal"), format!("generate {bundle} --prompt-ids 1,2 -n 1")];
    let package_lines = ["inspect", "check", "predict"].map(|command| format!("{command} {package}"));
    for (file, lines) in [
        (package.join(WEIGHTS), &package_lines[..]),
        (package.join(MODEL), &package_lines),
        (package.join("Manifest.json"), &package_lines),
        (dir.join("m.mlmodel"), &[format!("inspect {dir}/m.mlmodel")]),
        (dir.join("m.gguf"), &[format!("inspect {dir}/m.gguf")]),
        (checkpoint.join("model.safetensors"), &[format!("inspect {checkpoint}")]),
        (checkpoint.join("config.json"), &[format!("inspect {checkpoint}")]),
        (bundle.join("chain.json"), &bundle_lines),
        (bundle.join("embed.bin"), &bundle_lines),
        (bundle.join(&weights), &bundle_lines),
        (dir.join("in.npz"), &[format!("{predict} {dir}/in.npz")]),
        (dir.join("in.png"), &[format!("{predict} {dir}/in.png")]),
    ] {
        let kept = fs::read(&file).ok();
        fs::write(&file, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n").unwrap();
        for line in lines {
            refused(line, &["a Git LFS pointer", "123456", "lfs pull"]);
        }
        if let Some(kept) = kept {
            fs::write(&file, kept).unwrap();
        }
    }
}
