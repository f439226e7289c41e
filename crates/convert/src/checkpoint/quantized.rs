//! Hugging Face checkpoints that are quantized: what their `quantization_config` says, and FP8 weights under scales.
//!
//! ```text
//! NAME             f8   [.., rows, cols]
//! NAME_scale_inv   f32  [.., ceil(rows / 128), ceil(cols / 128)]   one for each block; or NAME_scale
//! NAME_scale       f32  [1], [rows] or [rows, 1]                   one for the tensor, or for each row
//!
//! weight = f8 * scale
//! ```
//!
//! Both names of the scale go with both layouts (<https://github.com/deepseek-ai/DeepSeek-V3>, `weight_scale_inv`;
//! <https://github.com/vllm-project/compressed-tensors>, `weight_scale`).

use super::{Dtype, SideFile, TensorInfo, TensorSource, check_finite, place_of};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Most characters of a value in a message.
const MAX_SHOWN: usize = 80;

/// Quantization of a checkpoint's weights that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// None, or one whose tensors the family names (MXFP4).
    None,
    /// FP8 under scales for blocks `[rows, cols]`, or else for rows or tensors.
    Fp8 { block: Option<[u64; 2]> },
}

/// Checks that a `config.json` names no quantization but those that are read. Nothing else of the checkpoint has to be
/// there.
///
/// # Errors
/// The quantization is another one, or its keys are wrong.
pub fn check_quantization(config: &Value, path: &Path) -> Result<()> {
    quantization(config, path).map(|_| ())
}

/// Returns the quantization that a `config.json` names.
pub fn quantization(config: &Value, path: &Path) -> Result<Quantization> {
    let keys = ["/quantization_config", "/text_config/quantization_config"];
    let found = keys.iter().find_map(|at| config.pointer(at).filter(|v| !v.is_null()).map(|v| (at, v)));
    let Some((at, value)) = found else {
        return match config.get("quantization").filter(|own| own.get("bits").is_some()) {
            None => Ok(Quantization::None),
            Some(own) => {
                let what =
                    format!("configuration: `quantization` is {}, the form of MLX", shown(&own.to_string()));
                Err(Error::unsupported(path, what))
            }
        };
    };
    let config = QuantizationKeys { path, at: at[1..].replace('/', "."), value };
    if !value.is_object() {
        return Err(Error::invalid(path, format!("configuration: `{}` is not a JSON object", config.at)));
    }
    match value["quant_method"].as_str() {
        Some("mxfp4") => Ok(Quantization::None),
        Some("fp8") => Ok(Quantization::Fp8 { block: config.block(&["weight_block_size"])? }),
        Some("compressed-tensors") => config.compressed_tensors(),
        _ => {
            let read = "fp8, mxfp4, and compressed-tensors of 8-bit floats";
            Err(config.unsupported(&["quant_method"], read))
        }
    }
}

/// Returns the start of a text of the file, for messages.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect()
}

/// Keys of a quantization.
struct QuantizationKeys<'a> {
    path: &'a Path,
    /// Path of the quantization's own key in the file.
    at: String,
    value: &'a Value,
}

impl QuantizationKeys<'_> {
    fn get(&self, keys: &[&str]) -> &Value {
        keys.iter().fold(self.value, |value, key| &value[*key])
    }

    /// Returns the path of a key in the file.
    fn name(&self, keys: &[&str]) -> String {
        let keys: Vec<String> = keys.iter().map(|key| shown(key)).collect();
        format!("{}.{}", self.at, keys.join("."))
    }

    /// Refuses the value of a key.
    fn unsupported(&self, keys: &[&str], read: &str) -> Error {
        let key = self.name(keys);
        let is = match self.get(keys) {
            Value::Null => "is missing".to_string(),
            Value::String(text) => format!("is `{}`", shown(text)),
            value => format!("is {}", shown(&value.to_string())),
        };
        let what = format!(
            "configuration: `{key}` {is}; read are {read}: take a checkpoint that is not quantized, or a .gguf file"
        );
        Error::unsupported(self.path, what)
    }

    /// Returns the rows and columns of a block; none where the key is not there.
    fn block(&self, keys: &[&str]) -> Result<Option<[u64; 2]>> {
        let value = self.get(keys);
        if value.is_null() {
            return Ok(None);
        }
        // compressed-tensors also writes `128x128`.
        let sizes = match value.as_str() {
            Some(text) => Some(text.split('x').map(|n| n.parse().ok()).collect::<Vec<_>>()),
            None => value.as_array().map(|all| all.iter().map(Value::as_u64).collect()),
        };
        match sizes.as_deref() {
            Some([Some(rows @ 1..), Some(cols @ 1..)]) => Ok(Some([*rows, *cols])),
            _ => {
                let key = self.name(keys);
                let what = format!("configuration: `{key}` is not a size of blocks `[rows, columns]`");
                Err(Error::invalid(self.path, what))
            }
        }
    }

    /// Reads the keys of compressed-tensors, whose groups are sets of layers.
    fn compressed_tensors(&self) -> Result<Quantization> {
        if !matches!(self.get(&["format"]).as_str(), Some("float-quantized" | "naive-quantized")) {
            return Err(self.unsupported(&["format"], "float-quantized and naive-quantized"));
        }
        for keys in [&["transform_config"][..], &["sparsity_config", "format"]] {
            let value = self.get(keys);
            let is_none =
                value.is_null() || value == "dense" || value.as_object().is_some_and(|o| o.is_empty());
            if !is_none {
                return Err(self.unsupported(keys, "dense weights as they are"));
            }
        }
        let groups = self.get(&["config_groups"]).as_object();
        let groups = groups.filter(|all| !all.is_empty());
        let groups = groups.ok_or_else(|| self.unsupported(&["config_groups"], "groups of 8-bit floats"))?;
        let mut block = None;
        for (i, group) in groups.keys().enumerate() {
            let at = |key: &'static str| ["config_groups", group.as_str(), "weights", key];
            if self.get(&at("type")) != "float" {
                return Err(self.unsupported(&at("type"), "float"));
            }
            if self.get(&at("num_bits")) != 8 {
                return Err(self.unsupported(&at("num_bits"), "8"));
            }
            if !matches!(self.get(&at("strategy")).as_str(), Some("tensor" | "channel" | "block")) {
                return Err(self.unsupported(&at("strategy"), "tensor, channel and block"));
            }
            let own = self.block(&at("block_structure"))?;
            if i > 0 && own != block {
                return Err(self.unsupported(&at("block_structure"), "blocks of one size"));
            }
            block = own;
        }
        Ok(Quantization::Fp8 { block })
    }
}

/// Scales of an FP8 tensor: a matrix of scales for each of the tensor's matrices `[rows, cols]`.
struct ScaleTensor {
    name: String,
    rows: u64,
    cols: u64,
    /// Rows and columns of a block under one scale.
    block: [u64; 2],
}

impl ScaleTensor {
    /// Finds out what each scale counts for, from the shapes.
    fn new(weight: &TensorInfo, scale: &TensorInfo, block: Option<[u64; 2]>) -> Result<ScaleTensor> {
        scale.check_weight()?;
        let name = scale.name.clone();
        let misfit = |expected: String| {
            let (weight, of) = (&weight.name, &weight.shape);
            let what = format!(
                "tensor `{name}`: shape {:?}, expected {expected} for `{weight}` {of:?}",
                scale.shape
            );
            Err(Error::invalid(&scale.file, what))
        };
        if let Some([high, wide]) = block {
            let [leading @ .., rows, cols] = weight.shape.as_slice() else {
                return misfit(format!("one for blocks of {high} by {wide}"));
            };
            let expected = [leading, &[rows.div_ceil(high), cols.div_ceil(wide)]].concat();
            if scale.shape != expected {
                return misfit(format!("{expected:?}"));
            }
            return Ok(ScaleTensor { name, rows: *rows, cols: *cols, block: [high, wide] });
        }
        // [], [1], [experts], [experts, rows] and the like, whose last axes of 1 are dropped.
        let end = scale.shape.iter().rposition(|&n| n != 1).map_or(0, |last| last + 1);
        let each = &scale.shape[..end];
        if each.len() >= weight.shape.len().max(1) || !weight.shape.starts_with(each) {
            return misfit("one for the tensor or for each row".to_string());
        }
        // The file's header was checked: products from the first axis on do not overflow.
        let cols = weight.elements().checked_div(each.iter().product()).unwrap_or(0);
        Ok(ScaleTensor { name, rows: 1, cols, block: [1, cols] })
    }

    /// Multiplies elements from `start` on by their scales.
    fn apply(&self, inner: &dyn TensorSource, start: u64, mut out: &mut [f32]) -> Result<()> {
        let [high, wide] = self.block;
        let mut scales = Vec::new();
        let mut held = 0..0;
        let mut at = start;
        while !out.is_empty() {
            // A row, or the part of it that is asked for.
            let (row, col) = (at / self.cols, at % self.cols);
            let (matrix, row) = (row / self.rows, row % self.rows);
            let n = (out.len() as u64).min(self.cols - col);
            let first = (matrix * self.rows.div_ceil(high) + row / high) * self.cols.div_ceil(wide);
            let needed = first + col / wide..first + (col + n).div_ceil(wide);
            if held != needed {
                scales.resize((needed.end - needed.start) as usize, 0f32);
                inner.read(&self.name, needed.clone(), &mut scales)?;
                held = needed;
            }
            let (mut now, later) = out.split_at_mut(n as usize);
            let mut left = wide - col % wide;
            for scale in &scales {
                let (block, rest) = now.split_at_mut((now.len() as u64).min(left) as usize);
                block.iter_mut().for_each(|v| *v *= scale);
                (now, left) = (rest, wide);
            }
            at += n;
            out = later;
        }
        Ok(())
    }
}

/// Tensors of a checkpoint whose FP8 weights are multiplied by their scales. Nobody sees the scales.
struct ScaledSource {
    inner: Box<dyn TensorSource>,
    tensors: Vec<TensorInfo>,
    /// Scales of each tensor; none of tensors that are not FP8.
    scales: Vec<Option<ScaleTensor>>,
}

/// Multiplies FP8 weights by their scales.
///
/// # Errors
/// A scale is missing, or its shape does not fit its weight's.
pub fn scaled(inner: Box<dyn TensorSource>, block: Option<[u64; 2]>) -> Result<Box<dyn TensorSource>> {
    let mut hidden = BTreeSet::new();
    let mut tensors = Vec::new();
    for info in inner.tensors() {
        if !matches!(info.dtype, Dtype::F8E4M3 | Dtype::F8E5M2) {
            tensors.push((info.clone(), None));
            continue;
        }
        let names = ["scale_inv", "scale"].map(|scale| format!("{}_{scale}", info.name));
        let scale = names.iter().find_map(|name| inner.info(name)).ok_or_else(|| {
            let what =
                format!("tensor `{}`: its scale `{}` or `{}` is missing", info.name, names[0], names[1]);
            Error::invalid(&info.file, what)
        })?;
        hidden.insert(scale.name.clone());
        // Scales of activations, which stay floats here.
        let layer = info.name.strip_suffix("weight");
        hidden.extend(
            layer.iter().flat_map(|layer| ["input_scale", "activation_scale"].map(|s| format!("{layer}{s}"))),
        );
        let whole = TensorInfo { bytes: info.bytes + scale.bytes, ..info.clone() };
        tensors.push((whole, Some(ScaleTensor::new(info, scale, block)?)));
    }
    tensors.retain(|(info, _)| !hidden.contains(&info.name));
    let (tensors, scales) = tensors.into_iter().unzip();
    Ok(Box::new(ScaledSource { inner, tensors, scales }))
}

impl TensorSource for ScaledSource {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn files(&self) -> BTreeSet<PathBuf> {
        self.inner.files()
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let i = place_of(&self.tensors, name)
            .ok_or_else(|| Error::invalid(self.path(), format!("use: no tensor `{name}`")))?;
        let start = range.start;
        self.inner.read(name, range, out)?;
        let Some(scale) = &self.scales[i] else { return Ok(()) };
        scale.apply(self.inner.as_ref(), start, out)?;
        check_finite(&self.tensors[i], start, out)
    }

    fn read_bytes(&self, name: &str, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(name, range, out)
    }

    fn read_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.inner.read_integers(name)
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        self.inner.side_file(name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Checkpoint, DerivedTensor, TensorOrigin, derive, open_checkpoint};
    use super::*;
    use half::bf16;
    use proptest::prelude::*;
    use safetensors::Dtype as Stored;
    use safetensors::tensor::TensorView;
    use serde_json::json;

    /// A tensor to write: name, type, shape and bytes.
    type Tensor = (&'static str, Stored, Vec<usize>, Vec<u8>);

    /// Writes a checkpoint and opens it.
    fn open(quantization: Value, tensors: &[Tensor]) -> Result<(tempfile::TempDir, Checkpoint)> {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"model_type": "any", "quantization_config": quantization});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        let checkpoint = open_checkpoint(dir.path())?;
        Ok((dir, checkpoint))
    }

    fn refused(quantization: Value, tensors: &[Tensor]) -> String {
        open(quantization, tensors).err().expect("an error").to_string()
    }

    fn read(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
        let n = checkpoint.source.info(name).unwrap().elements();
        let mut out = vec![f32::NAN; n as usize];
        checkpoint.source.read(name, 0..n, &mut out).unwrap();
        out
    }

    fn names(checkpoint: &Checkpoint) -> Vec<&str> {
        checkpoint.source.tensors().iter().map(|t| t.name.as_str()).collect()
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// Returns bytes that are not NaN in E4M3.
    fn floats(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 37 % 256) as u8).map(|b| if b & 0x7f == 0x7f { b - 1 } else { b }).collect()
    }

    /// Decodes an E4M3 as its definition says.
    fn e4m3(b: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(b >> 3 & 15), f64::from(b & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        (if b < 128 { magnitude } else { -magnitude }) as f32
    }

    fn fp8() -> Value {
        json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"]})
    }

    #[test]
    fn every_byte_of_both_kinds_of_f8() {
        let all: Vec<u8> = (0..=255).collect();
        let tensors =
            [("four", Stored::F8_E4M3, vec![256], all.clone()), ("five", Stored::F8_E5M2, vec![256], all)];
        let (_dir, c) = open(Value::Null, &tensors).unwrap();
        for b in 0..=255u8 {
            let mut out = [0f32];
            let at = u64::from(b)..u64::from(b) + 1;
            let found = c.source.read("four", at.clone(), &mut out);
            match b & 0x7f {
                0x7f => {
                    let err = found.unwrap_err().to_string();
                    assert!(err.contains(&format!("tensor `four`: element {b} is NaN")), "{err}");
                }
                _ => assert_eq!((found.is_ok(), out[0].to_bits()), (true, e4m3(b).to_bits()), "{b}"),
            }
            let found = c.source.read("five", at, &mut out);
            let (exponent, mantissa) = (i32::from(b >> 2 & 31), f64::from(b & 3));
            let magnitude = match exponent {
                0 => mantissa / 4.0 * 2f64.powi(-14),
                _ => (1.0 + mantissa / 4.0) * 2f64.powi(exponent - 15),
            };
            match exponent {
                31 => assert!(found.unwrap_err().to_string().contains("tensor `five`"), "{b}"),
                _ => assert_eq!((found.is_ok(), f64::from(out[0].abs())), (true, magnitude), "{b}"),
            }
        }
        assert_eq!(c.source.info("four").unwrap().dtype.name(), "f8_e4m3");
    }

    #[test]
    fn blocks_under_scales() {
        // Blocks of 128 rows and columns, the last of them cut.
        let (rows, cols) = (130, 300);
        let bytes = floats(rows * cols);
        let scales: Vec<f32> = (1..7u8).map(|i| 0.125 * f32::from(i)).collect();
        let rounded: Vec<u8> = scales.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        let tensors = [
            ("a.weight", Stored::F8_E4M3, vec![rows, cols], bytes.clone()),
            ("a.weight_scale_inv", Stored::BF16, vec![2, 3], rounded),
            ("norm.weight", Stored::F32, vec![2], f32s(&[1.0, 2.0])),
        ];
        let (_dir, c) = open(fp8(), &tensors).unwrap();
        assert_eq!(names(&c), ["a.weight", "norm.weight"]);
        assert_eq!(read(&c, "norm.weight"), [1.0, 2.0]);
        let scale = |i: usize| scales[i / cols / 128 * 3 + i % cols / 128];
        let expected: Vec<f32> = bytes.iter().enumerate().map(|(i, &b)| e4m3(b) * scale(i)).collect();
        assert_eq!(read(&c, "a.weight"), expected);
        for (start, end) in
            [(0, 1), (127, 129), (250, 310), (127 * cols + 299, 128 * cols + 1), (38_000, 39_000)]
        {
            let mut out = vec![0f32; end - start];
            c.source.read("a.weight", start as u64..end as u64, &mut out).unwrap();
            assert_eq!(out, expected[start..end], "{start}..{end}");
        }
        let info = c.source.info("a.weight").unwrap();
        assert_eq!((info.dtype, info.bytes), (Dtype::F8E4M3, 130 * 300 + 12));
        assert!(c.source.read("a.weight_scale_inv", 0..6, &mut [0.0; 6]).is_err());
    }

    #[test]
    fn blocks_of_stacked_experts() {
        let bytes = floats(2 * 3 * 5);
        let tensors = [
            ("experts.up", Stored::F8_E4M3, vec![2, 3, 5], bytes.clone()),
            (
                "experts.up_scale_inv",
                Stored::F32,
                vec![2, 2, 2],
                f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
            ),
        ];
        let config = json!({"quant_method": "fp8", "weight_block_size": [2, 4]});
        let (_dir, c) = open(config, &tensors).unwrap();
        let scale = |i: usize| (1 + i / 15 * 4 + i % 15 / 5 / 2 * 2 + i % 5 / 4) as f32;
        let expected: Vec<f32> = bytes.iter().enumerate().map(|(i, &b)| e4m3(b) * scale(i)).collect();
        assert_eq!(read(&c, "experts.up"), expected);
    }

    #[test]
    fn scales_of_tensors_rows_and_experts() {
        let bytes = floats(24);
        for (shape, of_scale, each) in [
            (vec![4, 6], vec![], 24),
            (vec![4, 6], vec![1], 24),
            (vec![4, 6], vec![1, 1], 24),
            (vec![4, 6], vec![4], 6),
            (vec![4, 6], vec![4, 1], 6),
            (vec![2, 2, 6], vec![2, 1, 1], 12),
            (vec![2, 2, 6], vec![2, 2, 1], 6),
            (vec![1, 24], vec![1, 1], 24),
            (vec![24], vec![1], 24),
        ] {
            let n = 24 / each;
            let scales: Vec<f32> = (1..=n).map(|i| i as f32 / 3.0).collect();
            let tensors = [
                ("a.weight", Stored::F8_E4M3, shape.clone(), bytes.clone()),
                ("a.weight_scale", Stored::F32, of_scale.clone(), f32s(&scales)),
                ("a.input_scale", Stored::F32, vec![1], f32s(&[9.0])),
            ];
            let (_dir, c) =
                open(json!({"quant_method": "fp8", "weight_block_size": null}), &tensors).unwrap();
            assert_eq!(names(&c), ["a.weight"]);
            let expected: Vec<f32> =
                bytes.iter().enumerate().map(|(i, &b)| e4m3(b) * scales[i / each]).collect();
            assert_eq!(read(&c, "a.weight"), expected, "{shape:?} {of_scale:?}");
        }
    }

    #[test]
    fn scales_that_do_not_fit() {
        let with = |block: Value, shape: &[usize], dtype, of_scale: &[usize]| {
            let n = shape.iter().product();
            let bytes =
                vec![0; of_scale.iter().product::<usize>() * if dtype == Stored::F32 { 4 } else { 1 }];
            let tensors = [
                ("a.weight", Stored::F8_E4M3, shape.to_vec(), floats(n)),
                ("a.weight_scale", dtype, of_scale.to_vec(), bytes),
            ];
            refused(json!({"quant_method": "fp8", "weight_block_size": block}), &tensors)
        };
        for (block, shape, of_scale, says) in [
            (json!([2, 4]), &[4, 6][..], &[2, 3][..], "shape [2, 3], expected [2, 2] for `a.weight` [4, 6]"),
            (json!([2, 4]), &[4, 6], &[4], "shape [4], expected [2, 2]"),
            (json!([2, 4]), &[24], &[6], "expected one for blocks of 2 by 4"),
            (Value::Null, &[4, 6], &[6], "expected one for the tensor or for each row"),
            (Value::Null, &[4, 6], &[1, 6], "expected one for the tensor or for each row"),
            (Value::Null, &[4, 6], &[4, 6], "expected one for the tensor or for each row"),
            (Value::Null, &[24], &[24], "expected one for the tensor or for each row"),
        ] {
            let what = with(block, shape, Stored::F32, of_scale);
            assert!(what.contains("invalid tensor `a.weight_scale`") && what.contains(says), "{what}");
        }
        let what = with(Value::Null, &[4, 6], Stored::U8, &[1]);
        assert!(what.contains("unsupported tensor `a.weight_scale`: dtype U8"), "{what}");
        let what = refused(fp8(), &[("a.weight", Stored::F8_E5M2, vec![2], vec![0, 0])]);
        let says = "tensor `a.weight`: its scale `a.weight_scale_inv` or `a.weight_scale` is missing";
        assert!(what.contains("model.safetensors: invalid") && what.contains(says), "{what}");
    }

    #[test]
    fn tensors_without_elements_under_scales() {
        let of = |shape: &[usize], of_scale: &[usize], config: Value| {
            let bytes = vec![0; 4 * of_scale.iter().product::<usize>()];
            let tensors = [
                ("a", Stored::F8_E4M3, shape.to_vec(), vec![]),
                ("a_scale", Stored::F32, of_scale.to_vec(), bytes),
            ];
            let (_dir, c) = open(config, &tensors).unwrap();
            assert!(read(&c, "a").is_empty());
        };
        let none = || json!({"quant_method": "fp8"});
        of(&[0, 1 << 40], &[0], none());
        of(&[0, 1 << 31, 1 << 31], &[0, 1 << 31], none());
        of(&[4, 0], &[4, 1], none());
        of(&[0, 4], &[0, 1], fp8());
        of(&[4, 0], &[1, 0], fp8());
    }

    #[test]
    fn values_and_scales_that_are_not_finite() {
        let with = |byte: u8, scale: f32| {
            let tensors = [
                ("a", Stored::F8_E4M3, vec![1, 2], vec![0, byte]),
                ("a_scale", Stored::F32, vec![1], f32s(&[scale])),
            ];
            let (_dir, c) = open(json!({"quant_method": "fp8"}), &tensors).unwrap();
            c.source.read("a", 0..2, &mut [0.0; 2]).unwrap_err().to_string()
        };
        assert!(with(0x7f, 1.0).contains("tensor `a`: element 1 is NaN"));
        assert!(with(0, f32::NAN).contains("tensor `a_scale`: element 0 is NaN"));
        assert!(with(0, f32::INFINITY).contains("tensor `a_scale`: element 0 is inf"));
        assert!(with(0x70, f32::MAX).contains("tensor `a`: element 1 is inf"));
    }

    #[test]
    fn floats_of_compressed_tensors() {
        let config = |strategy: &str, block: Value| {
            json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                "sparsity_config": {"format": "dense"}, "transform_config": {},
                "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": {"num_bits": 8},
                    "weights": {"type": "float", "num_bits": 8, "strategy": strategy, "block_structure": block}}}})
        };
        for (strategy, block, of_scale, each) in [
            ("channel", Value::Null, vec![2, 1], 4),
            ("tensor", Value::Null, vec![1], 8),
            ("block", json!([1, 4]), vec![2, 1], 4),
            ("block", json!("1x4"), vec![2, 1], 4),
        ] {
            let scales: Vec<f32> = [2.0, 3.0][..8 / each].to_vec();
            let bytes = floats(8);
            let tensors = [
                ("a.weight", Stored::F8_E4M3, vec![2, 4], bytes.clone()),
                ("a.weight_scale", Stored::F32, of_scale, f32s(&scales)),
            ];
            let (_dir, c) = open(config(strategy, block), &tensors).unwrap();
            let expected: Vec<f32> =
                bytes.iter().enumerate().map(|(i, &b)| e4m3(b) * scales[i / each]).collect();
            assert_eq!(read(&c, "a.weight"), expected);
        }
        let changed = |at: &str, value: Value| {
            let mut config = config("channel", Value::Null);
            *config.pointer_mut(at).unwrap() = value;
            refused(config, &[])
        };
        let weights = "/config_groups/group_0/weights";
        for (at, value, says) in [
            (
                "/format",
                json!("pack-quantized"),
                "unsupported configuration: `quantization_config.format` is `pack-quantized`",
            ),
            (
                "/sparsity_config/format",
                json!("sparse-24-bitmask"),
                "`quantization_config.sparsity_config.format` is",
            ),
            ("/transform_config", json!({"R1": 1}), "`quantization_config.transform_config` is {\"R1\":1}"),
            ("/config_groups", json!({}), "`quantization_config.config_groups` is {}"),
            (&format!("{weights}/type"), json!("int"), "config_groups.group_0.weights.type` is `int`"),
            (&format!("{weights}/num_bits"), json!(4), "weights.num_bits` is 4"),
            (&format!("{weights}/strategy"), json!("tensor_group"), "weights.strategy` is `tensor_group`"),
            (&format!("{weights}/block_structure"), json!("128x"), "weights.block_structure` is not a size"),
        ] {
            let what = changed(at, value);
            assert!(what.contains("config.json") && what.contains(says), "{what}");
        }
    }

    #[test]
    fn other_quantizations_are_unsupported() {
        for method in [
            "gptq",
            "awq",
            "bitsandbytes",
            "hqq",
            "quanto",
            "eetq",
            "torchao",
            "modelopt",
            "fbgemm_fp8",
            "of tomorrow",
        ] {
            let what = refused(json!({"quant_method": method}), &[]);
            let says = format!(
                "unsupported configuration: `quantization_config.quant_method` is `{method}`; read are fp8"
            );
            assert!(what.contains("config.json") && what.contains(&says), "{what}");
        }
        let what = refused(json!({"quant_method": "\u{1b}[1m".repeat(MAX_SHOWN)}), &[]);
        assert!(!what.contains('\u{1b}') && what.len() < 500, "{what}");
        for (config, is) in
            [(json!({"bits": 4, "group_size": 64}), "is missing"), (json!({"quant_method": 7}), "is 7")]
        {
            let what = refused(config, &[]);
            assert!(what.contains(&format!("`quantization_config.quant_method` {is}; read are")), "{what}");
        }
        let mlx = json!({"quantization": {"group_size": 64, "bits": 4}});
        let what = check_quantization(&mlx, Path::new("config.json")).unwrap_err().to_string();
        assert!(what.contains("unsupported") && what.contains("the form of MLX"), "{what}");
        let nested = json!({"text_config": {"quantization_config": {"quant_method": "awq"}}});
        let what = check_quantization(&nested, Path::new("config.json")).unwrap_err().to_string();
        assert!(what.contains("`text_config.quantization_config.quant_method` is `awq`"), "{what}");
    }

    #[test]
    fn a_quantization_whose_keys_are_wrong() {
        let what = refused(json!("fp8"), &[]);
        assert!(
            what.contains("config.json: invalid configuration: `quantization_config` is not a JSON object"),
            "{what}"
        );
        for size in
            [json!([128]), json!([0, 128]), json!([128, -1]), json!(128), json!([1.5, 2]), json!([1, 2, 3])]
        {
            let what = refused(json!({"quant_method": "fp8", "weight_block_size": size}), &[]);
            assert!(
                what.contains("`quantization_config.weight_block_size` is not a size of blocks"),
                "{what}"
            );
        }
    }

    #[test]
    fn a_checkpoint_in_mxfp4() {
        let blocks: Vec<u8> = (0..2 * 4 * 2 * 16).map(|i| (i * 29 % 256) as u8).collect();
        let scales: Vec<u8> = (0..2 * 4 * 2u8).map(|i| 120 + i).collect();
        let tensors = [
            ("experts.up_blocks", Stored::U8, vec![2, 4, 2, 16], blocks.clone()),
            ("experts.up_scales", Stored::U8, vec![2, 4, 2], scales.clone()),
        ];
        let config = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]});
        let (dir, c) = open(config, &tensors).unwrap();
        let err = c.source.read("experts.up_blocks", 0..1, &mut [0.0]).unwrap_err().to_string();
        assert!(err.contains("unsupported tensor `experts.up_blocks`: dtype U8, expected BF16"), "{err}");
        let origin = TensorOrigin::Mxfp4 {
            blocks: "experts.up_blocks".into(),
            scales: "experts.up_scales".into(),
            interleaved: 2,
        };
        let before = c.fingerprint().unwrap();
        let tensor = DerivedTensor { name: "experts.gate_up".into(), shape: vec![2, 4, 64], origin };
        let c = derive(c, vec![tensor], |_| false).unwrap();
        assert_eq!(c.fingerprint().unwrap(), before);
        let fp4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0f32];
        let mut expected = Vec::new();
        for expert in 0..2 {
            for row in [0, 2, 1, 3] {
                for i in (expert * 4 + row) * 64..(expert * 4 + row + 1) * 64 {
                    let nibble = blocks[i / 2] >> (4 * (i % 2)) & 15;
                    expected.push(fp4[usize::from(nibble)] * 2f32.powi(i32::from(scales[i / 32]) - 127));
                }
            }
        }
        assert_eq!(read(&c, "experts.gate_up"), expected);
        drop(dir);
    }

    /// Checks that FP8 under scales can be read in other layouts.
    #[test]
    fn experts_in_fp8_become_one_tensor() {
        let tensors = [
            ("0.weight", Stored::F8_E4M3, vec![2, 2], vec![0x38; 4]),
            ("0.weight_scale_inv", Stored::F32, vec![1, 1], f32s(&[3.0])),
            ("1.weight", Stored::F8_E4M3, vec![2, 2], vec![0x40; 4]),
            ("1.weight_scale_inv", Stored::F32, vec![1, 1], f32s(&[5.0])),
        ];
        let (_dir, c) = open(fp8(), &tensors).unwrap();
        let origin = TensorOrigin::Pieces(vec!["0.weight".into(), "1.weight".into()]);
        let tensor = DerivedTensor { name: "all".into(), shape: vec![2, 2, 2], origin };
        let c = derive(c, vec![tensor], |_| false).unwrap();
        assert_eq!(read(&c, "all"), [3.0, 3.0, 3.0, 3.0, 10.0, 10.0, 10.0, 10.0]);
    }

    proptest! {
        /// Checks that no shapes make a panic, and that what opens is read in any pieces.
        #[test]
        fn any_shapes_of_weight_and_scale(
            shape in proptest::collection::vec(0usize..7, 0..5),
            of_scale in proptest::collection::vec(0usize..7, 0..5),
            block in proptest::option::of((1u64..5, 1u64..5)),
            cut in 0.0f64..1.0,
        ) {
            let [n, scales] = [&shape, &of_scale].map(|shape| shape.iter().product::<usize>());
            let values: Vec<f32> = (0..scales).map(|i| i as f32).collect();
            let tensors = [
                ("a", Stored::F8_E4M3, shape, floats(n)),
                ("a_scale", Stored::F32, of_scale, f32s(&values)),
            ];
            let block = block.map(|(high, wide)| [high, wide]);
            let Ok((_dir, c)) = open(json!({"quant_method": "fp8", "weight_block_size": block}), &tensors) else {
                return Ok(());
            };
            let whole = read(&c, "a");
            let at = (cut * n as f64) as usize;
            let (mut head, mut tail) = (vec![0f32; at], vec![0f32; n - at]);
            c.source.read("a", 0..at as u64, &mut head).unwrap();
            c.source.read("a", at as u64..n as u64, &mut tail).unwrap();
            prop_assert_eq!([head, tail].concat(), whole);
        }
    }
}
