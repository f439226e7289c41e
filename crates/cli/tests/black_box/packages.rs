//! Packages of other tools: images, labels, defaults, and models that are no ML Programs.

use crate::common::{anemoe, build, copy, finish, fixture, json, refused, run};
use anemoe_mlpackage::blob::BlobFile;
use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::{
    Argument, Binding, ColorSpace, DataType, Feature, FeatureKind, FeatureShape, Immediate, MlModel, Opset,
    TensorData, TensorType, Value, ValueData, ValueType,
};
use anemoe_mlpackage::package::{Package, PackageWriter};
use anemoe_mlpackage::spec;
use anemoe_npz::{Array, read_npz, write_npz};
use image::{DynamicImage, GrayImage, ImageFormat, Rgb, RgbImage};
use serde_json::Value as Json;
use std::fs;
use std::path::{Path, PathBuf};

const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn write(path: &Path, picture: impl Into<DynamicImage>, format: ImageFormat) {
    picture.into().save_with_format(path, format).unwrap();
}

/// Copies the classifier of `tests/packages`, which coremltools 7.2 wrote, and edits its model.
fn colors(at: &Path, edit: impl FnOnce(&mut MlModel)) -> PathBuf {
    let package = at.join("colors.mlpackage");
    let _ = fs::remove_dir_all(&package);
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packages/colors.mlpackage"), &package);
    let file = package.join(MODEL);
    let mut model = spec::decode(&fs::read(&file).unwrap(), &file).unwrap();
    edit(&mut model);
    fs::write(&file, spec::encode(&model).unwrap()).unwrap();
    package
}

#[test]
fn a_classifier_names_the_class_of_a_picture() {
    let dir = tempfile::tempdir().unwrap();
    let package = colors(dir.path(), |_| ());
    // Fields that were not initialised before coremltools 8: they are there, and mean nothing.
    let bytes = fs::read(package.join(WEIGHTS)).unwrap();
    assert!(bytes[64 + 24..128].iter().any(|b| *b != 0));
    BlobFile::open(&package.join(WEIGHTS)).unwrap();

    let shown = run(&["inspect", text(&package)]).1;
    for line in ["image RGB [1, 3, 4, 6]", "classLabel string", "classLabel_probs dictionary of string"] {
        assert!(shown.contains(line), "`{line}` is not in\n{shown}");
    }
    let features = json(0, &["inspect", text(&package)]);
    let input = &features["functions"]["main"]["inputs"][0];
    assert_eq!((&input["kind"], &input["color"]), (&Json::from("image"), &Json::from("RGB")), "{input}");
    let (code, _, err) = run(&["check", text(&package)]);
    assert!(code < 2, "{err}");

    let label = |package: &Path, picture: &Path| {
        let v = json(0, &["predict", text(package), "--inputs", &format!("image={}", text(picture))]);
        v["outputs"][0]["classes"].clone()
    };
    let picture = dir.path().join("picture");
    // Another size is scaled, PNG and JPEG are told apart by their contents.
    for (color, name) in [([255, 0, 0], "red"), ([0, 0, 255], "blue"), ([255, 255, 255], "white")] {
        for (size, format) in [((6, 4), ImageFormat::Png), ((40, 30), ImageFormat::Jpeg)] {
            write(&picture, RgbImage::from_pixel(size.0, size.1, Rgb(color)), format);
            let classes = label(&package, &picture);
            assert_eq!(classes["classLabel"], name, "{classes}");
            let p = classes["classLabel_probs"][name].as_f64().unwrap();
            let expected = if name == "white" { 0.9474 } else { 0.9996 };
            assert!((p - expected).abs() < 0.001, "{classes}");
        }
    }
    // Gray of 255 is white.
    write(&picture, GrayImage::from_pixel(6, 4, image::Luma([255])), ImageFormat::Png);
    assert_eq!(label(&package, &picture)["classLabel"], "white");

    // The only image needs no name, each picture is a step of its own, and arrays have the program's layout or a picture's.
    let red = dir.path().join("red.png");
    write(&red, RgbImage::from_pixel(6, 4, Rgb([255, 0, 0])), ImageFormat::Png);
    let (code, out, err) = run(&["predict", text(&package), "--inputs", text(&red), text(&red)]);
    assert!(code == 0 && out.matches("classLabel: red 0.9996").count() == 2, "{out}{err}");
    let npz = dir.path().join("in.npz");
    let out = dir.path().join("out.npz");
    let planes: Vec<u8> = [255u8, 0, 0].iter().flat_map(|&v| [v; 24]).collect();
    let pixels: Vec<u8> = [255u8, 0, 0].repeat(24);
    for (shape, data) in [(vec![1, 3, 4, 6], planes), (vec![4, 6, 3], pixels)] {
        write_npz(&npz, &[("image".into(), Array::new(shape, data).unwrap())]).unwrap();
        let args = ["predict", text(&package), "--inputs", text(&npz), "--outputs", text(&out), "--force"];
        assert_eq!(json(0, &args)["outputs"][0]["classes"]["classLabel"], "red");
        let arrays = read_npz(&out).unwrap();
        assert_eq!((arrays.len(), &arrays["classLabel_probs"].shape[..]), (1, &[4][..]));
    }

    // A package that takes blue first.
    let bgr = |m: &mut MlModel| m.functions[0].inputs[0].kind = FeatureKind::Image(ColorSpace::Bgr);
    assert_eq!(label(&colors(dir.path(), bgr), &red)["classLabel"], "blue");
    // Numbers as labels.
    let numbered = colors(dir.path(), |m| {
        for (feature, kind) in
            m.functions[0].outputs.iter_mut().zip([FeatureKind::Scalar, FeatureKind::Dictionary])
        {
            *feature =
                Feature { kind, ..Feature::array(&*feature.name, DataType::Int64, FeatureShape::Dynamic) };
        }
        let operations = &mut m.program.functions.get_mut("main").unwrap().block.operations;
        let op = operations.iter_mut().find(|op| op.op_type == "classify").unwrap();
        let scalar = ValueType::Tensor(TensorType::scalar(DataType::Int64));
        let number = |n| Value {
            ty: scalar.clone(),
            data: ValueData::Immediate(Immediate::Tensor(TensorData::LongInts(vec![n]))),
        };
        let ty = ValueType::List { element: Box::new(scalar.clone()), length: 4.into() };
        let list =
            Value { ty, data: ValueData::Immediate(Immediate::List([7, -1, 1 << 40, 9].map(number).into())) };
        op.inputs.insert("classes".into(), Argument(vec![Binding::Value(list)]));
        op.outputs[0].ty = scalar.clone();
        let value = Box::new(ValueType::Tensor(TensorType::scalar(DataType::Float64)));
        op.outputs[1].ty = ValueType::Dictionary { key: Box::new(scalar), value };
    });
    let classes = label(&numbered, &red);
    assert_eq!(classes["classLabel"], 7);
    assert!(classes["classLabel_probs"]["1099511627776"].is_f64(), "{classes}");
    assert_eq!(anemoe_mlpackage::mil::verify::verify(Package::open(&numbered).unwrap().model()), []);
}

/// Writes a package that adds 100 to an image and a number to it; the number has a default.
fn brighter(at: &Path, color: ColorSpace) -> PathBuf {
    let dims = [1, color.channels(), 2, 3];
    let mut f = FunctionBuilder::new(Opset::CoreML7);
    let x = f.input("x", TensorType::fixed(DataType::Float32, &dims)).unwrap();
    let by = f.input("by", TensorType::fixed(DataType::Float32, &[1])).unwrap();
    let y = f.add("y", &x, &by).unwrap();
    f.output(&y).unwrap();
    let mut model = model(Opset::CoreML7, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    let described = &mut model.functions[0];
    described.inputs[0].kind = FeatureKind::Image(color);
    described.inputs[1].default = Some(100.0);
    described.outputs[0].kind = FeatureKind::Image(color);
    if color == ColorSpace::GrayscaleFloat16 {
        described.inputs[0].dtype = DataType::Float16;
        described.outputs[0].dtype = DataType::Float16;
    }
    let path = at.join("brighter.mlpackage");
    PackageWriter::replace(&path).unwrap().finish(&model).unwrap();
    let read = Package::open(&path).unwrap();
    assert_eq!(read.model(), &model);
    assert_eq!(anemoe_mlpackage::mil::verify::verify(read.model()), []);
    path
}

#[test]
fn images_come_out_and_defaults_stand_in() {
    let dir = tempfile::tempdir().unwrap();
    let (picture, out) = (dir.path().join("in.png"), dir.path().join("out.png"));
    let pixels = vec![0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 250];
    write(&picture, RgbImage::from_raw(3, 2, pixels.clone()).unwrap(), ImageFormat::Png);
    let mut expected: Vec<u8> = pixels.iter().map(|v| v.saturating_add(100)).collect();
    for color in [ColorSpace::Rgb, ColorSpace::Bgr] {
        let package = brighter(dir.path(), color);
        json(0, &["predict", text(&package), "--inputs", text(&picture), "--outputs", text(&out), "--force"]);
        assert_eq!(image::open(&out).unwrap().to_rgb8().into_raw(), expected, "{color:?}");
    }
    // The default is one input's value, no constant.
    let package = brighter(dir.path(), ColorSpace::Rgb);
    let by = dir.path().join("by.npy");
    anemoe_npz::write_npy(&by, &Array::new(vec![1], vec![0f32]).unwrap()).unwrap();
    let by = format!("by={}", text(&by));
    json(
        0,
        &["predict", text(&package), "--inputs", text(&picture), &by, "--outputs", text(&out), "--force"],
    );
    expected = pixels;
    assert_eq!(image::open(&out).unwrap().to_rgb8().into_raw(), expected);
    // The path of an input need not be text.
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStringExt;
        let odd = dir.path().join(std::ffi::OsString::from_vec(b"\xff=.png".to_vec()));
        fs::copy(&picture, &odd).unwrap();
        fs::remove_file(&out).unwrap();
        let mut given = std::ffi::OsString::from("x=");
        given.push(&odd);
        let mut command = anemoe(&["predict", text(&package), "--outputs", text(&out), "--inputs", &by]);
        let (code, _, err) = finish(command.arg(given).output().unwrap());
        assert_eq!(code, 0, "{err}");
        assert_eq!(image::open(&out).unwrap().to_rgb8().into_raw(), expected);
    }
    let inspected = json(0, &["inspect", text(&package)]);
    assert_eq!(inspected["functions"]["main"]["inputs"][1]["default"], 100.0);

    // fp16 gray counts from 0 to 1.
    let package = brighter(dir.path(), ColorSpace::GrayscaleFloat16);
    write(&picture, GrayImage::from_pixel(3, 2, image::Luma([51])), ImageFormat::Png);
    let npz = dir.path().join("out.npz");
    json(0, &["predict", text(&package), "--inputs", text(&picture), "--outputs", text(&npz)]);
    let values = read_npz(&npz).unwrap()["y"].to_f32();
    assert!(values.iter().all(|v| (v - 100.2).abs() < 0.1), "{values:?}");

    refused(&["predict", text(&package)], &["no array `x`", "x, by"]);
    refused(&["predict", text(&package), "--inputs", "z=in.png"], &["`z` is not an input", "x, by"]);
    refused(
        &["predict", text(&package), "--inputs", &format!("by={}", text(&picture))],
        &["`by` is no image"],
    );
    fs::write(&picture, "no picture").unwrap();
    refused(&["predict", text(&package), "--inputs", text(&picture)], &["in.png", "PNG and JPEG"]);
}

/// Makes a model of a kind by its field in the specification, with an empty message.
fn other_model(field: u32) -> Vec<u8> {
    let mut bytes = vec![8, 4];
    let mut key = field << 3 | 2;
    while key >= 128 {
        bytes.push((key & 127) as u8 | 128);
        key >>= 7;
    }
    bytes.extend([key as u8, 0]);
    bytes
}

#[test]
fn other_models_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let package = colors(dir.path(), |_| ());
    let single = dir.path().join("single.mlmodel");
    for (field, name) in
        [(500, "a neural network (specification version 4)"), (202, "a pipeline"), (610, "suppression")]
    {
        fs::write(package.join(MODEL), other_model(field)).unwrap();
        fs::write(&single, other_model(field)).unwrap();
        for path in [text(&package), text(&single)] {
            refused(&["inspect", path], &["unsupported", name]);
            refused(&["check", path], &["unsupported", name]);
            refused(&["predict", path], &["unsupported", name]);
            refused(&["quantize", path], &["unsupported", name]);
        }
    }
    let compiled = dir.path().join("m.mlmodelc");
    fs::create_dir(&compiled).unwrap();
    for command in ["inspect", "check", "predict", "quantize"] {
        refused(&[command, text(&compiled)], &["m.mlmodelc", "compiled", ".mlpackage"]);
    }
    // An ML Program by itself is one.
    let package = colors(dir.path(), |_| ());
    json(0, &["inspect", text(&package.join(MODEL))]);
}

#[test]
fn weights_of_packages_can_be_quantized() {
    let dir = tempfile::tempdir().unwrap();
    let package = colors(dir.path(), |_| ());
    let figures = json(0, &["quantize", text(&package), "--quant", "int8-channel"]);
    assert_eq!((figures["weights"].as_u64(), &figures["shape"]), (Some(12), &serde_json::json!([4, 3])));
    refused(&["quantize", &format!("{}:w", text(&package))], &["no weight `w`"]);
}

#[test]
fn git_lfs_pointers_are_named_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let says = &["a Git LFS pointer", "123456", "lfs pull"];
    for file in [WEIGHTS, MODEL, "Manifest.json"] {
        let package = colors(dir.path(), |_| ());
        fs::write(package.join(file), POINTER).unwrap();
        for command in ["inspect", "check", "predict"] {
            refused(&[command, text(&package)], says);
        }
    }
    let single = dir.path().join("m.mlmodel");
    fs::write(&single, POINTER).unwrap();
    refused(&["inspect", text(&single)], says);
    let gguf = dir.path().join("m.gguf");
    fs::write(&gguf, POINTER).unwrap();
    refused(&["inspect", text(&gguf)], says);
    for file in ["model.safetensors", "config.json"] {
        let checkpoint = dir.path().join("checkpoint");
        copy(&fixture("tiny-zaya"), &checkpoint);
        fs::write(checkpoint.join(file), POINTER).unwrap();
        refused(&["inspect", text(&checkpoint)], says);
    }
    let bundle = dir.path().join("b.anemoe");
    build(&fixture("tiny-zaya"), &bundle, &["--no-journal"]);
    let weights = format!("shards/L00.attn.mlpackage/{WEIGHTS}");
    for file in ["chain.json", "embed.bin", &weights] {
        let kept = fs::read(bundle.join(file)).unwrap();
        fs::write(bundle.join(file), POINTER).unwrap();
        refused(&["check", text(&bundle), "--no-journal"], says);
        refused(&["generate", text(&bundle), "--prompt-ids", "1,2", "--max-new", "1"], says);
        fs::write(bundle.join(file), kept).unwrap();
    }
    let npz = dir.path().join("in.npz");
    fs::write(&npz, POINTER).unwrap();
    let package = colors(dir.path(), |_| ());
    refused(&["predict", text(&package), "--inputs", text(&npz)], says);
    let picture = dir.path().join("in.png");
    fs::write(&picture, POINTER).unwrap();
    refused(&["predict", text(&package), "--inputs", text(&picture)], says);
}
