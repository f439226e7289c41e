//! Hugging Face folders: one `model.safetensors`, or else many files behind an index.

use super::gguf::dequantize::dequantize;
use super::safetensors_header::{self, HeaderTensor, LENGTH_BYTES};
use super::{Dtype, SideFile, TensorInfo, TensorSource, check_finite, map_file, place_of, read_json};
use crate::{Error, Result};
use anemoe_io::{RangedFile, RangedFiles};
use memmap2::Mmap;
use serde::Deserialize;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Weight files of layouts that are not read.
const OTHER_WEIGHTS: [&str; 5] = [
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "adapter_model.safetensors",
];
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Most files of a checkpoint without an index.
const MAX_FILES: u32 = 10_000;

/// File of weights: on this machine, or elsewhere.
enum WeightFile {
    Mapped(Mmap),
    Ranged(Arc<dyn RangedFile>),
}

/// Tensors of a folder: memory-mapped, or read in ranges from files that are elsewhere.
pub struct Folder {
    path: PathBuf,
    files: Vec<WeightFile>,
    tensors: Vec<TensorInfo>,
    /// File of each tensor, and the start of its data there.
    places: Vec<(usize, usize)>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Folder {
    /// Maps every file, except those in `elsewhere`, and checks every header.
    pub fn open(folder: &Path, elsewhere: &RangedFiles) -> Result<Folder> {
        let index_path = folder.join(INDEX);
        let is_whole = elsewhere.contains_key(SINGLE) || folder.join(SINGLE).exists();
        let index = if index_path.exists() {
            let text =
                anemoe_io::read_input(&index_path, MAX_INDEX_BYTES).map_err(|e| Error::io(&index_path, e))?;
            let index: ShardIndex = anemoe_io::json::parse_large(&text)
                .map_err(|e| Error::invalid(&index_path, format!("index: {e}")))?;
            // Beside a whole file, an index of other files is left over from shards that were merged.
            let plain = |file: String| file.strip_prefix("./").map_or(file.clone(), str::to_string);
            let places: BTreeMap<_, _> =
                index.weight_map.into_iter().map(|(t, file)| (t, plain(file))).collect();
            Some(places).filter(|map| !is_whole || map.values().any(|file| file == SINGLE))
        } else {
            if !is_whole
                && let Some(other) = OTHER_WEIGHTS.into_iter().find(|name| folder.join(name).exists())
            {
                let what = format!("weights: they are in {other}; read are {SINGLE}, {INDEX} and .gguf");
                return Err(Error::unsupported(folder, what));
            }
            None
        };
        let names: BTreeSet<String> = match &index {
            Some(index) => index.values().cloned().collect(),
            None if is_whole => BTreeSet::from([SINGLE.to_string()]),
            None => numbered_files(folder).unwrap_or_else(|| BTreeSet::from([SINGLE.to_string()])),
        };
        let mut files = Vec::new();
        let mut found: BTreeMap<String, (TensorInfo, usize, usize)> = BTreeMap::new();
        for name in &names {
            let tensor = || index.iter().flatten().find(|(_, file)| *file == name).map_or("", |(t, _)| t);
            let wrong = |what: &str| {
                let what =
                    format!("index: tensor `{}`: file name `{}` {what}", tensor(), name.escape_debug());
                Error::invalid(&index_path, what)
            };
            // `Path` drops `.` and slashes at the end, so the text is looked at.
            if matches!(name.rsplit('/').next(), None | Some("" | "." | "..")) {
                return Err(wrong("names no file"));
            }
            if !Path::new(name).components().all(|c| matches!(c, Component::Normal(_))) {
                return Err(wrong("leaves the folder"));
            }
            let path = folder.join(name);
            let (file, tensors) = match elsewhere.get(name) {
                Some(file) => read_header_elsewhere(&path, file)?,
                None if index.is_some() && path.symlink_metadata().is_err() => {
                    let what = format!("no such file; by the index it holds tensor `{}` and more", tensor());
                    return Err(Error::io(&path, io::Error::new(io::ErrorKind::NotFound, what)));
                }
                None => map(&path)?,
            };
            for (info, start) in tensors {
                // A tensor that the index leaves out is read, as in transformers.
                let place = index.as_ref().and_then(|index| index.get(&info.name));
                if let Some(other) = place.filter(|place| *place != name) {
                    let what = format!("tensor `{}`: the index places it in {other}, not here", info.name);
                    return Err(Error::invalid(&path, what));
                }
                if let Some((before, ..)) = found.get(&info.name) {
                    let what = format!("tensor `{}`: it is in {} too", info.name, before.file.display());
                    return Err(Error::invalid(&path, what));
                }
                found.insert(info.name.clone(), (info, files.len(), start));
            }
            files.push(file);
        }
        if let Some(index) = &index
            && let Some((tensor, file)) = index.iter().find(|(t, _)| !found.contains_key(*t))
        {
            return Err(Error::invalid(
                folder.join(file),
                format!("file: tensor `{tensor}` of the index is not in it"),
            ));
        }
        let (mut tensors, mut places) = (Vec::new(), Vec::new());
        for (info, file, start) in found.into_values() {
            tensors.push(info);
            places.push((file, start));
        }
        Ok(Folder { path: folder.to_path_buf(), files, tensors, places })
    }
}

impl Folder {
    /// Maps one file by itself.
    pub fn single(path: &Path) -> Result<Folder> {
        let (file, found) = map(path)?;
        let sorted: BTreeMap<String, (TensorInfo, usize)> =
            found.into_iter().map(|(info, start)| (info.name.clone(), (info, start))).collect();
        let (mut tensors, mut places) = (Vec::new(), Vec::new());
        for (info, start) in sorted.into_values() {
            tensors.push(info);
            places.push((0, start));
        }
        Ok(Folder { path: path.to_path_buf(), files: vec![file], tensors, places })
    }

    /// Returns a tensor of which a range is read, with its file and the start of its data there.
    fn place(&self, name: &str, range: &Range<u64>, buffer: usize) -> Result<(&TensorInfo, usize, usize)> {
        let i = place_of(&self.tensors, name)
            .ok_or_else(|| Error::invalid(&self.path, format!("use: no tensor `{name}`")))?;
        let info = &self.tensors[i];
        info.check_range(range, buffer)?;
        let (file, start) = self.places[i];
        Ok((info, file, start))
    }

    /// Returns bytes of a file.
    fn bytes(&self, file: usize, range: Range<usize>) -> Result<Cow<'_, [u8]>> {
        match &self.files[file] {
            WeightFile::Mapped(map) => Ok(map[range].into()),
            WeightFile::Ranged(file) => {
                let mut bytes = vec![0; range.len()];
                file.read_range(range.start as u64, &mut bytes)?;
                Ok(bytes.into())
            }
        }
    }
}

type MappedFile = (WeightFile, Vec<(TensorInfo, usize)>);

fn map(path: &Path) -> Result<MappedFile> {
    let map = map_file(path)?;
    let tensors = safetensors_header::parse(&map).map_err(|e| e.at(path))?;
    Ok((WeightFile::Mapped(map), placed(path, tensors)))
}

/// Reads only the header of a file that is elsewhere.
fn read_header_elsewhere(path: &Path, file: &Arc<dyn RangedFile>) -> Result<MappedFile> {
    let bytes = file.bytes();
    let mut first = vec![0; (LENGTH_BYTES as u64).min(bytes) as usize];
    file.read_range(0, &mut first)?;
    let place = safetensors_header::json_place(&first, bytes).map_err(|e| e.at(path))?;
    let mut json = vec![0; place.len()];
    file.read_range(place.start as u64, &mut json)?;
    let tensors = safetensors_header::parse_json(&json, bytes).map_err(|e| e.at(path))?;
    Ok((WeightFile::Ranged(Arc::clone(file)), placed(path, tensors)))
}

/// Adds the special tokens of a `special_tokens_map.json` that a `tokenizer_config.json` does not name, or that stand
/// alone.
fn with_special_tokens(path: Option<PathBuf>, map: PathBuf) -> Result<Option<SideFile>> {
    let Some(path) = path else { return Ok(Some(SideFile::Path(map))) };
    let mut config = read_json(&path)?;
    let (Some(all), Value::Object(tokens)) = (config.as_object_mut(), read_json(&map)?) else {
        return Ok(Some(SideFile::Path(path)));
    };
    let missing: Vec<_> = tokens.into_iter().filter(|(key, _)| !all.contains_key(key)).collect();
    if missing.is_empty() {
        return Ok(Some(SideFile::Path(path)));
    }
    all.extend(missing);
    Ok(Some(SideFile::Bytes(config.to_string().into())))
}

/// Returns the names of the files of a checkpoint without an index, `NAME-00001-of-00003.safetensors` to the last, if one of
/// them is there.
fn numbered_files(folder: &Path) -> Option<BTreeSet<String>> {
    let names = |file: &str| {
        let (first, of) = file.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = first.rsplit_once('-')?;
        let count = of.parse::<u32>().ok().filter(|n| number.parse::<u32>().is_ok() && *n <= MAX_FILES)?;
        let width = number.len();
        Some((1..=count).map(|i| format!("{stem}-{i:0width$}-of-{of}.safetensors")).collect())
    };
    let mut files: Vec<_> = std::fs::read_dir(folder).ok()?.flatten().map(|file| file.file_name()).collect();
    files.sort();
    files.iter().find_map(|file| names(file.to_str()?))
}

fn placed(path: &Path, tensors: Vec<HeaderTensor>) -> Vec<(TensorInfo, usize)> {
    let info = |HeaderTensor { name, dtype, shape, bytes }| {
        let info = TensorInfo { name, dtype, shape, bytes: bytes.len() as u64, file: path.to_path_buf() };
        (info, bytes.start)
    };
    tensors.into_iter().map(info).collect()
}

impl TensorSource for Folder {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        // A pipe or a broken link is refused when it is read, not taken for a file that is not there.
        let found = |name: &str| Some(self.path.join(name)).filter(|path| path.symlink_metadata().is_ok());
        match (name, found(name)) {
            ("chat_template.jinja", None) => {
                // The older form, of models with images.
                let config = found("chat_template.json").map(|path| read_json(&path)).transpose()?;
                let text = config.as_ref().and_then(|config| config["chat_template"].as_str());
                Ok(text.map(|text| SideFile::Bytes(text.into())))
            }
            ("tokenizer_config.json", path) => match found("special_tokens_map.json") {
                Some(map) => with_special_tokens(path, map),
                None => Ok(path.map(SideFile::Path)),
            },
            (_, path) => Ok(path.map(SideFile::Path)),
        }
    }

    fn read_bytes(&self, name: &str, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let (info, file, start) = self.place(name, &range, out.len())?;
        if info.dtype != Dtype::U8 {
            let dtype = info.dtype.name().to_uppercase();
            let what = format!("tensor `{name}`: dtype {dtype}, expected U8");
            return Err(Error::unsupported(&info.file, what));
        }
        let start = start + range.start as usize;
        out.copy_from_slice(&self.bytes(file, start..start + out.len())?);
        Ok(())
    }

    fn read_integers(&self, name: &str) -> Result<Vec<i64>> {
        let elements = self.info(name).map_or(0, TensorInfo::elements);
        let (info, file, start) = self.place(name, &(0..elements), elements as usize)?;
        let bytes = self.bytes(file, start..start + info.bytes as usize)?;
        let wide = |b: &[u8; 4]| i64::from(i32::from_le_bytes(*b));
        match info.dtype.name() {
            "i64" => Ok(bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
            "i32" => Ok(bytes.as_chunks::<4>().0.iter().map(wide).collect()),
            other => {
                let dtype = other.to_uppercase();
                let what = format!("tensor `{name}`: dtype {dtype}, expected I64 or I32");
                Err(Error::unsupported(&info.file, what))
            }
        }
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let (info, file, start) = self.place(name, &range, out.len())?;
        info.check_weight()?;
        // These types have blocks of one element.
        let element = info.dtype.block_bytes();
        let start = start + range.start as usize * element;
        dequantize(info.dtype, &self.bytes(file, start..start + out.len() * element)?, 0, out);
        check_finite(info, range.start, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use safetensors::tensor::TensorView;

    /// A folder with two files of one tensor each and an index.
    struct Example(tempfile::TempDir);

    impl Example {
        fn new() -> Self {
            let e = Example(tempfile::tempdir().unwrap());
            e.write("one.safetensors", "a", &[1.0, 2.0, 3.0, 4.0]);
            e.write("two.safetensors", "b", &[5.0]);
            e.index(r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
            e
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn write(&self, file: &str, tensor: &str, values: &[f32]) {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let view = TensorView::new(safetensors::Dtype::F32, vec![values.len()], &bytes).unwrap();
            std::fs::write(self.at(file), safetensors::serialize([(tensor, view)], None).unwrap()).unwrap();
        }

        fn index(&self, weight_map: &str) {
            let text = format!(r#"{{"metadata":{{"total_size":20}},"weight_map":{weight_map}}}"#);
            std::fs::write(self.at(INDEX), text).unwrap();
        }

        fn refused(&self) -> String {
            Folder::open(self.0.path(), &RangedFiles::new()).err().expect("an error").to_string()
        }
    }

    #[test]
    fn pieces_of_tensors_in_two_files() {
        let e = Example::new();
        let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
        assert_eq!(folder.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        e.index(r#"{"a":"./one.safetensors","b":"two.safetensors"}"#);
        let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
        let mut out = [0f32; 2];
        folder.read("a", 1..3, &mut out).unwrap();
        assert_eq!(out, [2.0, 3.0]);
        folder.read("b", 0..1, &mut out[..1]).unwrap();
        assert_eq!(out[0], 5.0);
        let refused =
            |name, range, n: usize| folder.read(name, range, &mut vec![0f32; n]).unwrap_err().to_string();
        assert!(refused("c", 0..1, 1).contains("no tensor `c`"));
        assert!(refused("a", 3..5, 2).contains("elements 3..5 of tensor `a`"));
        assert!(refused("a", 0..2, 3).contains("elements 0..2"));
        assert!(refused("a", Range { start: 3, end: 2 }, 1).contains("elements"));
    }

    #[test]
    fn weights_in_other_layouts_are_named() {
        for name in OTHER_WEIGHTS {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(name), "").unwrap();
            let refused = Folder::open(dir.path(), &RangedFiles::new()).err().unwrap().to_string();
            assert!(refused.contains(&format!("unsupported weights: they are in {name}")), "{refused}");
        }
    }

    #[test]
    fn every_dtype_is_read_as_f32() {
        let dir = tempfile::tempdir().unwrap();
        let half: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
        let brain: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        let views = [
            ("f16", TensorView::new(safetensors::Dtype::F16, vec![2], &half).unwrap()),
            ("bf16", TensorView::new(safetensors::Dtype::BF16, vec![2, 1], &brain).unwrap()),
        ];
        std::fs::write(dir.path().join(SINGLE), safetensors::serialize(views, None).unwrap()).unwrap();
        let folder = Folder::open(dir.path(), &RangedFiles::new()).unwrap();
        for name in ["f16", "bf16"] {
            let mut out = [0f32; 2];
            folder.read(name, 0..2, &mut out).unwrap();
            assert_eq!(out, [1.5, -2.0]);
        }
        assert_eq!(folder.info("bf16").unwrap().shape, [2, 1]);
    }

    #[test]
    fn bytes_and_integers_are_no_weights() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..16).collect();
        let views = [
            ("bytes", TensorView::new(safetensors::Dtype::U8, vec![4, 4], &bytes).unwrap()),
            ("numbers", TensorView::new(safetensors::Dtype::I64, vec![2], &bytes).unwrap()),
        ];
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.path().join(SINGLE), &file).unwrap();
        let length = file.len() as u64;
        let (_, elsewhere) = elsewhere(file, length);
        let files = RangedFiles::from([(SINGLE.to_string(), Arc::clone(&elsewhere["one.safetensors"]))]);
        for files in [RangedFiles::new(), files] {
            let folder = Folder::open(dir.path(), &files).unwrap();
            let mut out = [0u8; 3];
            folder.read_bytes("bytes", 5..8, &mut out).unwrap();
            assert_eq!(out, [5, 6, 7]);
            let err = |name, range| folder.read_bytes(name, range, &mut [0; 3]).unwrap_err().to_string();
            assert!(err("bytes", 14..17).contains("elements 14..17 of tensor `bytes`"));
            assert!(err("none", 0..3).contains("no tensor `none`"));
            assert!(err("numbers", 0..2).contains("elements 0..2 of tensor `numbers`"));
            let read = folder.read_bytes("numbers", 0..2, &mut [0; 2]).unwrap_err().to_string();
            assert!(read.contains("unsupported tensor `numbers`: dtype I64, expected U8"), "{read}");
            for (name, dtype) in [("bytes", "U8"), ("numbers", "I64")] {
                let read = folder.read(name, 0..2, &mut [0.0; 2]).unwrap_err().to_string();
                let says = format!(
                    "unsupported tensor `{name}`: dtype {dtype}, expected BF16, F16, F32, F8_E4M3 or F8_E5M2"
                );
                assert!(read.contains(&says), "{read}");
            }
        }
    }

    #[test]
    fn a_weight_that_is_not_a_number() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let e = Example::new();
            e.write("one.safetensors", "a", &[0.0, 0.0, bad, 0.0]);
            let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
            assert!(folder.read("a", 0..2, &mut [0f32; 2]).is_ok());
            let err = folder.read("a", 1..4, &mut [0f32; 3]).unwrap_err().to_string();
            assert!(err.contains("one.safetensors") && err.contains("tensor `a`: element 2 is"), "{err}");
        }
    }

    #[test]
    fn an_index_that_names_a_missing_file() {
        let e = Example::new();
        std::fs::remove_file(e.at("two.safetensors")).unwrap();
        let said = e.refused();
        assert!(said.contains("two.safetensors: no such file; by the index it holds tensor `b`"), "{said}");
        std::fs::create_dir(e.at("two.safetensors")).unwrap();
        assert!(e.refused().contains("two.safetensors"));
    }

    #[test]
    fn templates_and_special_tokens_have_older_places() {
        let e = Example::new();
        let write = |name: &str, text: &str| std::fs::write(e.at(name), text).unwrap();
        let read = |name: &str| {
            let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
            let file = folder.side_file(name).unwrap().unwrap();
            String::from_utf8(file.read().unwrap().into_owned()).unwrap()
        };
        write("chat_template.json", r#"{"chat_template": "old"}"#);
        assert_eq!(read("chat_template.jinja"), "old");
        write("chat_template.jinja", "new");
        assert_eq!(read("chat_template.jinja"), "new");
        let tokens = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
        write("special_tokens_map.json", tokens);
        assert_eq!(read("tokenizer_config.json"), tokens);
        std::fs::remove_file(e.at("special_tokens_map.json")).unwrap();
        write("tokenizer_config.json", r#"{"eos_token": null}"#);
        assert_eq!(read("tokenizer_config.json"), r#"{"eos_token": null}"#);
        write("special_tokens_map.json", tokens);
        assert_eq!(read("tokenizer_config.json"), r#"{"eos_token":null,"bos_token":"<s>"}"#);
    }

    #[test]
    fn numbered_files_without_an_index_are_read() {
        let e = Example::new();
        std::fs::remove_file(e.at(INDEX)).unwrap();
        std::fs::rename(e.at("one.safetensors"), e.at("x-00001-of-00002.safetensors")).unwrap();
        assert!(e.refused().contains("x-00002-of-00002.safetensors"));
        std::fs::rename(e.at("two.safetensors"), e.at("x-00002-of-00002.safetensors")).unwrap();
        let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
        assert_eq!(folder.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        std::fs::write(e.at("a-1-of-4000000000.safetensors"), "").unwrap();
        assert!(Folder::open(e.0.path(), &RangedFiles::new()).is_ok());
    }

    #[test]
    fn an_index_whose_tensor_is_not_in_its_file() {
        let e = Example::new();
        e.index(r#"{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}"#);
        assert!(e.refused().contains("tensor `c` of the index is not in it"));
    }

    #[test]
    fn a_tensor_that_the_index_does_not_have_is_read() {
        let e = Example::new();
        e.write("one.safetensors", "b", &[1.0]);
        e.index(r#"{"b":"one.safetensors"}"#);
        let names = |e: &Example| {
            let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
            folder.tensors().iter().map(|t| t.name.clone()).collect::<Vec<_>>()
        };
        // A file that the index does not name is no part of the checkpoint.
        assert_eq!(names(&e), ["b"]);
        let view = || TensorView::new(safetensors::Dtype::U8, vec![4], &[0; 4]).unwrap();
        let file = safetensors::serialize([("b", view()), ("c", view())], None).unwrap();
        std::fs::write(e.at("one.safetensors"), file).unwrap();
        assert_eq!(names(&e), ["b", "c"]);
        e.write("two.safetensors", "c", &[1.0]);
        e.index(r#"{"b":"one.safetensors","c":"two.safetensors"}"#);
        assert!(e.refused().contains("one.safetensors: invalid tensor `c`: the index places it in two"));
        e.index(r#"{"b":"one.safetensors"}"#);
        assert_eq!(names(&e), ["b", "c"]);
    }

    #[test]
    fn a_size_of_the_index_is_not_looked_at() {
        let e = Example::new();
        let map = r#"{"a":"one.safetensors","b":"two.safetensors"}"#;
        for metadata in [r#"{"total_size":7}"#, r#"{"total_size":"x","total_parameters":-1}"#, "null", "{}"] {
            std::fs::write(e.at(INDEX), format!(r#"{{"metadata":{metadata},"weight_map":{map}}}"#)).unwrap();
            assert!(Folder::open(e.0.path(), &RangedFiles::new()).is_ok(), "{metadata}");
        }
    }

    #[test]
    fn a_tensor_in_two_files() {
        let e = Example::new();
        e.write("two.safetensors", "a", &[0.0]);
        let says = "two.safetensors: invalid tensor `a`: the index places it in one.safetensors, not here";
        assert!(e.refused().contains(says), "{}", e.refused());
    }

    #[test]
    fn an_index_with_a_tensor_twice() {
        let e = Example::new();
        e.index(r#"{"a":"one.safetensors","a":"one.safetensors","b":"two.safetensors"}"#);
        assert!(e.refused().contains("key `a` is there twice"));
    }

    #[test]
    fn an_index_that_leaves_the_folder() {
        let e = Example::new();
        for file in ["../one.safetensors", "/etc/passwd", "a/../../b"] {
            e.index(&format!(r#"{{"a":"{file}","b":"two.safetensors"}}"#));
            assert!(e.refused().contains("leaves the folder"), "{file}");
        }
    }

    #[test]
    fn an_index_with_an_entry_that_names_no_file() {
        let e = Example::new();
        for file in ["", ".", "..", "folder/", "folder/."] {
            e.index(&format!(r#"{{"a":"{file}","b":"two.safetensors"}}"#));
            let said = e.refused();
            assert!(
                said.contains(INDEX) && said.contains("tensor `a`") && said.contains("names no file"),
                "{said}"
            );
        }
    }

    #[test]
    fn an_index_of_other_files_beside_a_whole_one() {
        let e = Example::new();
        e.write(SINGLE, "c", &[6.0]);
        let names = || {
            let folder = Folder::open(e.0.path(), &RangedFiles::new()).unwrap();
            folder.tensors().iter().map(|t| t.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(), ["c"]);
        for file in ["one.safetensors", "two.safetensors"] {
            std::fs::remove_file(e.at(file)).unwrap();
        }
        assert_eq!(names(), ["c"]);
        e.write("one.safetensors", "a", &[1.0]);
        e.index(&format!(r#"{{"a":"one.safetensors","c":"{SINGLE}"}}"#));
        assert_eq!(names(), ["a", "c"]);
    }

    #[test]
    fn an_index_that_is_not_an_index() {
        let e = Example::new();
        for text in ["", "{}", "[]", r#"{"weight_map":{"a":1}}"#] {
            std::fs::write(e.at(INDEX), text).unwrap();
            assert!(e.refused().contains(INDEX), "{text}");
        }
    }

    #[test]
    fn a_file_that_is_cut_off() {
        let e = Example::new();
        let bytes = std::fs::read(e.at("one.safetensors")).unwrap();
        for n in [0, 7, 20, bytes.len() - 1] {
            std::fs::write(e.at("one.safetensors"), &bytes[..n]).unwrap();
            assert!(e.refused().contains("one.safetensors: invalid"), "{n}");
        }
    }

    /// A file in memory that counts the bytes read from it, and claims another length.
    struct Counted {
        bytes: Vec<u8>,
        length: u64,
        read: std::sync::atomic::AtomicUsize,
    }

    impl RangedFile for Counted {
        fn bytes(&self) -> u64 {
            self.length
        }

        fn read_range(&self, start: u64, out: &mut [u8]) -> Result<()> {
            self.read.fetch_add(out.len(), std::sync::atomic::Ordering::Relaxed);
            out.copy_from_slice(&self.bytes[start as usize..start as usize + out.len()]);
            Ok(())
        }
    }

    fn elsewhere(bytes: Vec<u8>, length: u64) -> (Arc<Counted>, RangedFiles) {
        let file = Arc::new(Counted { bytes, length, read: 0.into() });
        let shared: Arc<dyn RangedFile> = file.clone();
        (file, RangedFiles::from([("one.safetensors".to_string(), shared)]))
    }

    #[test]
    fn of_a_file_elsewhere_header_and_ranges_are_read() {
        let e = Example::new();
        let values: Vec<f32> = (0..10_000u16).map(f32::from).collect();
        e.write("one.safetensors", "a", &values);
        let bytes = std::fs::read(e.at("one.safetensors")).unwrap();
        std::fs::remove_file(e.at("one.safetensors")).unwrap();
        let length = bytes.len() as u64;
        let (file, files) = elsewhere(bytes, length);
        let folder = Folder::open(e.0.path(), &files).unwrap();
        let mut out = [0f32; 3];
        folder.read("a", 700..703, &mut out).unwrap();
        assert_eq!(out, [700.0, 701.0, 702.0]);
        folder.read("b", 0..1, &mut out[..1]).unwrap();
        assert_eq!(out[0], 5.0);
        let read = file.read.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(read, length as usize - 40_000 + 12);
    }

    #[test]
    fn headers_elsewhere_that_lie_are_refused_before_they_are_read() {
        let e = Example::new();
        let whole = std::fs::read(e.at("one.safetensors")).unwrap();
        let huge = [&(1u64 << 60).to_le_bytes()[..], &whole[8..]].concat();
        for (bytes, length, says) in [
            (huge, u64::MAX, "a length of 1152921504606846976 bytes"),
            (whole.clone(), 20, "but only 12 follow"),
            (whole.clone(), 5, "the file has 5 bytes"),
            (whole.clone(), whole.len() as u64 - 1, "the file is cut off"),
            (whole.clone(), whole.len() as u64 + 9, "9 bytes behind the last tensor"),
        ] {
            let (file, files) = elsewhere(bytes, length);
            let said = Folder::open(e.0.path(), &files).err().expect("an error").to_string();
            assert!(said.contains("one.safetensors") && said.contains(says), "{said}");
            assert!(file.read.load(std::sync::atomic::Ordering::Relaxed) <= whole.len(), "{says}");
        }
    }

    #[test]
    fn a_folder_without_weights() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Folder::open(dir.path(), &RangedFiles::new()).err().unwrap().to_string().contains(SINGLE));
    }
}
