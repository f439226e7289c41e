//! The `.mlpackage` directory.

use crate::blob::{Blob, BlobFile, BlobWriter, SharedBlob};
use crate::mil::{Argument, Binding, Block, MlModel, TensorData, Value, ValueData, ValueType};
use crate::{Error, Result, spec};
use anemoe_io::Temporary;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

const MANIFEST: &str = "Manifest.json";
const DATA: &str = "Data";
const AUTHOR: &str = "com.apple.CoreML";
const MODEL_FILE: &str = "model.mlmodel";
const WEIGHTS_DIR: &str = "weights";
const WEIGHTS_FILE: &str = "weight.bin";
/// Prefix of the file names of blob values: the directory of `model.mlmodel`.
const MODEL_PATH: &str = "@model_path/";
/// Bytes of the largest model file: the limit of a protobuf message.
const MAX_MODEL_BYTES: u64 = 2 << 30;
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "fileFormatVersion")]
    version: String,
    #[serde(rename = "itemInfoEntries")]
    items: BTreeMap<String, ManifestItem>,
    #[serde(rename = "rootModelIdentifier")]
    root: String,
}

#[derive(Deserialize)]
struct ManifestItem {
    path: String,
}

/// Sizes of the package that [`PackageWriter::finish`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackageInfo {
    /// Bytes of `model.mlmodel`.
    pub model_bytes: u64,
    /// Bytes of `weight.bin`; 0 without one.
    pub weight_bytes: u64,
}

/// Writes a package beside its place and renames it there when it is complete.
pub struct PackageWriter {
    target: PathBuf,
    overwrite: bool,
    /// Temporary folder of the package; dropping it removes it unless it was renamed.
    directory: Temporary,
    weights: BlobWriter,
}

impl PackageWriter {
    /// Starts the package `target`, which must not exist and must end in `.mlpackage`.
    ///
    /// # Errors
    /// The path exists, has another extension, or its parent directory cannot be written.
    pub fn create(target: &Path) -> Result<Self> {
        if target.symlink_metadata().is_ok() {
            return Err(Error::invalid(target, "output: it exists already"));
        }
        Self::start(target, false)
    }

    /// Starts a package like [`PackageWriter::create`] that replaces an existing package once it is complete.
    ///
    /// # Errors
    /// Something else than a package exists there, the path has another extension, or its parent directory cannot be written.
    pub fn replace(target: &Path) -> Result<Self> {
        if target.symlink_metadata().is_ok() {
            let manifest = read_limited(&target.join(MANIFEST), MAX_MANIFEST_BYTES);
            let is_package = !target.is_symlink()
                && manifest.is_ok_and(|text| serde_json::from_slice::<Manifest>(&text).is_ok());
            if !is_package {
                return Err(Error::invalid(target, "output: it exists and is not a package"));
            }
            if let Some(foreign) = foreign_entry(target).map_err(|e| Error::io(target, e))? {
                let what = "output: this lies in a package that is to be replaced, and is no part of it; move it away";
                return Err(Error::invalid(foreign, what));
            }
        }
        Self::start(target, true)
    }

    fn start(target: &Path, overwrite: bool) -> Result<Self> {
        check_extension(target)?;
        let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let directory = Temporary::dir(parent, ".mlpackage").map_err(|e| Error::io(target, e))?;
        let weights = directory.path().join(DATA).join(AUTHOR).join(WEIGHTS_DIR);
        fs::create_dir_all(&weights).map_err(|e| Error::io(&weights, e))?;
        let shown = target.join(DATA).join(AUTHOR).join(WEIGHTS_DIR).join(WEIGHTS_FILE);
        let weights = BlobWriter::named(weights.join(WEIGHTS_FILE), shown);
        Ok(PackageWriter { target: target.to_path_buf(), overwrite, directory, weights })
    }

    /// Returns the writer of the weight file; [`Value::blob`] refers to its blobs by offset.
    pub fn weights(&mut self) -> &mut BlobWriter {
        &mut self.weights
    }

    /// Writes the model and the manifest, flushes everything and moves the package into place.
    ///
    /// # Errors
    /// The model cannot be represented, or a file operation fails; nothing is left behind then.
    pub fn finish(self, model: &MlModel) -> Result<PackageInfo> {
        let PackageWriter { target, overwrite, directory, weights } = self;
        let root = directory.path().to_path_buf();
        let bytes = spec::encode(model)?;
        let weight_bytes = weights.finish()?;
        // Errors show the package's final name, which users know.
        write_files(&root, &bytes, weight_bytes.is_some()).map_err(|e| {
            e.map_path(|path| match path.strip_prefix(&root) {
                Ok(inside) => target.join(inside),
                Err(_) => path,
            })
        })?;
        let aside = if overwrite && target.exists() {
            let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let aside = Temporary::dir(parent, "").map_err(|e| Error::io(&target, e))?;
            fs::rename(&target, aside.path().join("old")).map_err(|e| Error::io(&target, e))?;
            Some(aside)
        } else {
            None
        };
        directory.persist(&target).map_err(|e| Error::io(&target, e))?;
        drop(aside);
        let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_dir(parent)?;
        Ok(PackageInfo { model_bytes: bytes.len() as u64, weight_bytes: weight_bytes.unwrap_or(0) })
    }
}

/// Finds an entry in a package's folder that [`PackageWriter`] does not write: another name, a link, or a file in a
/// folder's place. Files of macOS's Finder (`.DS_Store`, `._*`) do not count. `None` means that removing the folder
/// loses nothing else.
///
/// # Errors
/// A folder cannot be read.
pub fn foreign_entry(package: &Path) -> io::Result<Option<PathBuf>> {
    // Per level: the names that may exist, and the name that is a folder.
    let levels: [(&[&str], &str); 4] = [
        (&[MANIFEST, DATA], DATA),
        (&[AUTHOR], AUTHOR),
        (&[MODEL_FILE, WEIGHTS_DIR], WEIGHTS_DIR),
        (&[WEIGHTS_FILE], ""),
    ];
    let mut dir = package.to_path_buf();
    if !dir.symlink_metadata()?.is_dir() {
        return Ok(Some(dir));
    }
    for (names, folder) in levels {
        let mut next = None;
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let (name, kind) = (entry.file_name(), entry.file_type()?);
            // Finder's files: views of folders, and a file's attributes on other file systems.
            let of_finder = name == ".DS_Store" || name.as_encoded_bytes().starts_with(b"._");
            let known = names.iter().any(|n| name == *n) || of_finder;
            let is_folder = !folder.is_empty() && name == *folder;
            let right = if is_folder { kind.is_dir() } else { kind.is_file() };
            if !known || !right {
                return Ok(Some(entry.path()));
            }
            if is_folder {
                next = Some(entry.path());
            }
        }
        match next {
            Some(path) => dir = path,
            None => break,
        }
    }
    Ok(None)
}

/// Writes the model and the manifest, and flushes every folder.
fn write_files(root: &Path, model: &[u8], has_weights: bool) -> Result<()> {
    let data = root.join(DATA).join(AUTHOR);
    if !has_weights {
        let empty = data.join(WEIGHTS_DIR);
        fs::remove_dir(&empty).map_err(|e| Error::io(&empty, e))?;
    }
    write_synced(&data.join(MODEL_FILE), model)?;
    write_synced(&root.join(MANIFEST), manifest(model, has_weights).as_bytes())?;
    for dir in [data.join(WEIGHTS_DIR), data, root.join(DATA), root.to_path_buf()] {
        if dir.is_dir() {
            sync_dir(&dir)?;
        }
    }
    make_readable(root)
}

/// Tells whether a path is named as Core ML's models are: `.mlpackage`, `.mlmodel` or, compiled, `.mlmodelc`.
pub fn is_model_name(path: &Path) -> bool {
    path.extension().is_some_and(|e| ["mlpackage", "mlmodel", "mlmodelc"].iter().any(|known| e == *known))
}

fn check_extension(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|e| e == "mlpackage") {
        Ok(())
    } else {
        Err(Error::invalid(path, "name: a package ends in .mlpackage"))
    }
}

/// Sets a folder's mode to 0755 on Unix: temporary folders are private, a package is readable like other new folders.
fn make_readable(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).map_err(|e| Error::io(dir, e))?;
    }
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    let mut file = File::create_new(path).map_err(|e| Error::io(path, e))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| Error::io(path, e))
}

fn sync_dir(dir: &Path) -> Result<()> {
    anemoe_io::sync_dir(dir).map_err(|e| Error::io(dir, e))
}

/// Makes the text of `Manifest.json`. Its identifiers are UUIDs of the model's bytes, so that equal packages have equal
/// manifests.
fn manifest(model: &[u8], weights: bool) -> String {
    let digest = Sha256::digest(model);
    let id = |name: &str| {
        let mut seed = digest.to_vec();
        seed.extend(name.as_bytes());
        uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, &seed).to_string()
    };
    let entry = |name: &str, description: &str| {
        serde_json::json!({
            "author": AUTHOR,
            "description": description,
            "name": name,
            "path": format!("{AUTHOR}/{name}"),
        })
    };
    let root = id(MODEL_FILE);
    let mut items = BTreeMap::from([(root.clone(), entry(MODEL_FILE, "CoreML Model Specification"))]);
    if weights {
        items.insert(id(WEIGHTS_DIR), entry(WEIGHTS_DIR, "CoreML Model Weights"));
    }
    let manifest = serde_json::json!({
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": items,
        "rootModelIdentifier": root,
    });
    // Four spaces, sorted keys, a final newline: the form in which Apple's ModelPackage library rewrites a manifest
    // when it opens a package.
    let mut text = Vec::new();
    let indent = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, indent);
    manifest.serialize(&mut serializer).expect("JSON values are written into memory");
    text.push(b'\n');
    String::from_utf8(text).expect("JSON is UTF-8")
}

/// Mapped weight files by the name that blob values use.
#[derive(Clone, Default)]
pub struct WeightFiles(BTreeMap<String, Arc<BlobFile>>);

impl WeightFiles {
    /// Releases the resident pages of all files; see [`BlobFile::release`].
    pub fn release(&self) {
        self.0.values().for_each(|w| w.release());
    }

    /// Adds the files of `others` whose names are not here yet.
    pub fn extend(&mut self, others: &WeightFiles) {
        for (name, file) in &others.0 {
            self.0.entry(name.clone()).or_insert_with(|| file.clone());
        }
    }

    /// Maps all pages of all files ahead of use; see [`BlobFile::populate`].
    pub fn populate(&self) {
        self.0.values().for_each(|w| w.populate());
    }
}

/// An open package: its model, and its mapped weight files.
pub struct Package {
    path: PathBuf,
    model: MlModel,
    weights: WeightFiles,
    total_bytes: u64,
}

impl std::fmt::Debug for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Package").field("path", &self.path).field("total_bytes", &self.total_bytes).finish()
    }
}

impl Package {
    /// Opens and checks a package: manifest, model, and every blob that the program names. A `.mlmodel` is a model without a
    /// manifest; its weight files, if it has any, lie beside it.
    ///
    /// # Errors
    /// A file is missing or wrong, or the model is not an ML Program.
    pub fn open(path: &Path) -> Result<Package> {
        Package::open_with(path, None, &WeightFiles::default())
    }

    /// Opens a package like [`Package::open`] to run its functions named in `wanted`. Other functions are not decoded,
    /// and a wanted function may be missing. Weight files in `mapped` are not mapped again.
    ///
    /// # Errors
    /// Fails like [`Package::open`].
    pub fn open_to_run(path: &Path, wanted: &[&str], mapped: &WeightFiles) -> Result<Package> {
        Package::open_with(path, Some(wanted), mapped)
    }

    fn open_with(path: &Path, wanted: Option<&[&str]>, mapped: &WeightFiles) -> Result<Package> {
        let (model_path, manifest_bytes) = match path.extension().and_then(|e| e.to_str()) {
            Some("mlmodel") => (path.to_path_buf(), 0),
            Some("mlmodelc") => {
                let what = "package: a compiled model, which only Core ML reads; give the .mlpackage that it was compiled from";
                return Err(Error::unsupported(path, what));
            }
            _ => Package::read_manifest(path)?,
        };
        let bytes = read_limited(&model_path, MAX_MODEL_BYTES)?;
        let mut package = Package::read_model(path, &bytes, &model_path, wanted, mapped)?;
        package.total_bytes += manifest_bytes;
        Ok(package)
    }

    /// Opens a model that is in memory, like [`Package::open`] for a `.mlmodel` at `place`: weight files lie beside it, and errors
    /// name it.
    ///
    /// # Errors
    /// Fails like [`Package::open`].
    pub fn of_model(bytes: &[u8], place: &Path) -> Result<Package> {
        Package::read_model(place, bytes, place, None, &WeightFiles::default())
    }

    fn read_model(
        path: &Path,
        bytes: &[u8],
        model_path: &Path,
        wanted: Option<&[&str]>,
        mapped: &WeightFiles,
    ) -> Result<Package> {
        let model = spec::decode_some(bytes, model_path, wanted)?;
        let mut package =
            Package { path: path.to_path_buf(), model, weights: WeightFiles::default(), total_bytes: 0 };
        let open = if wanted.is_some() { BlobFile::open_to_run } else { BlobFile::open };
        package.open_weights(model_path, mapped, &open)?;
        package.total_bytes = bytes.len() as u64 + package.weights.0.values().map(|w| w.len()).sum::<u64>();
        Ok(package)
    }

    /// Returns the path of the model that a package's manifest names, and the manifest's length.
    fn read_manifest(path: &Path) -> Result<(PathBuf, u64)> {
        check_extension(path)?;
        let manifest_path = path.join(MANIFEST);
        let text = read_limited(&manifest_path, MAX_MANIFEST_BYTES)?;
        let manifest: Manifest = anemoe_io::json::parse(&text)
            .map_err(|e| Error::invalid(&manifest_path, format!("manifest: {e}")))?;
        check_version(&manifest.version).map_err(|what| Error::invalid(&manifest_path, what))?;
        for (id, item) in &manifest.items {
            // Items are checked where something refers to them: coremltools lists a weights folder, which is lost in a
            // copy without empty folders.
            if relative(&item.path).is_none() {
                let what = format!("manifest: item {id}: path `{}` leaves the package", item.path);
                return Err(Error::invalid(&manifest_path, what));
            }
        }
        let root = manifest.items.get(&manifest.root).and_then(|item| relative(&item.path));
        let root = root.ok_or_else(|| {
            Error::invalid(&manifest_path, format!("manifest: root model `{}` is not an item", manifest.root))
        })?;
        Ok((path.join(DATA).join(root), text.len() as u64))
    }

    fn open_weights(
        &mut self,
        model_path: &Path,
        mapped: &WeightFiles,
        open: &dyn Fn(&Path) -> Result<BlobFile>,
    ) -> Result<()> {
        let mut values = Vec::new();
        for (name, function) in &self.model.program.functions {
            collect(&function.block, name, &mut values);
        }
        let mut weights: BTreeMap<String, Arc<BlobFile>> = BTreeMap::new();
        for (place, value) in values {
            let ValueData::Blob { file, offset } = &value.data else { continue };
            let wrong = |what: String| Error::invalid(model_path, format!("{place}: {what}"));
            if !weights.contains_key(file) {
                let inside = file.strip_prefix(MODEL_PATH).and_then(relative);
                let inside =
                    inside.ok_or_else(|| wrong(format!("weight file `{file}` is outside the package")))?;
                let directory = model_path.parent().unwrap_or(Path::new("."));
                let opened = match mapped.0.get(file) {
                    Some(opened) => opened.clone(),
                    None => Arc::new(open(&directory.join(inside))?),
                };
                weights.insert(file.clone(), opened);
            }
            let blob = weights[file].blob(*offset).map_err(|e| wrong(e.to_string()))?;
            let ValueType::Tensor(ty) = &value.ty else {
                return Err(wrong(format!("a blob of type {}", value.ty)));
            };
            // Types must be equal: a blob of a 1-byte type could be taken for bools.
            if blob.dtype != ty.dtype || Some(blob.count) != ty.elements() {
                return Err(wrong(format!(
                    "type {ty} where the blob at {offset} holds {} elements of {}",
                    blob.count, blob.dtype
                )));
            }
        }
        self.weights = WeightFiles(weights);
        Ok(())
    }

    /// Returns the model.
    pub fn model(&self) -> &MlModel {
        &self.model
    }

    /// Returns the path of `model.mlmodel` as [`PackageWriter`] places it.
    pub fn model_file(&self) -> PathBuf {
        self.path.join(DATA).join(AUTHOR).join(MODEL_FILE)
    }

    /// Encodes the model as [`PackageWriter`] writes it; the bytes equal the stored ones unless another tool rewrote
    /// them. Without `metadata` (author, license, user-defined fields) they are the bytes before a tool described the model.
    ///
    /// # Errors
    /// The model cannot be represented.
    pub fn model_as_written(&self, metadata: bool) -> Result<Vec<u8>> {
        match metadata {
            true => spec::encode(&self.model),
            false => spec::encode_with(&self.model, &BTreeMap::new()),
        }
    }

    /// Returns the path of the package.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes of manifest, model and weight files together.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the weight files.
    pub fn weights(&self) -> &WeightFiles {
        &self.weights
    }

    /// Returns the blob that a value of this package's program refers to.
    ///
    /// # Errors
    /// The value is immediate, or does not come from this package.
    pub fn blob(&self, value: &Value) -> Result<Blob<'_>> {
        match &value.data {
            ValueData::Blob { file, offset } => match self.weights.0.get(file) {
                Some(weights) => weights.blob(*offset),
                None => Err(Error::invalid(&self.path, format!("use: no weight file `{file}`"))),
            },
            ValueData::Immediate(_) => Err(Error::invalid(&self.path, "use: an immediate value has no blob")),
        }
    }

    /// Returns a blob like [`Package::blob`] that keeps its weight file mapped.
    ///
    /// # Errors
    /// Fails like [`Package::blob`].
    pub fn shared_blob(&self, value: &Value) -> Result<SharedBlob> {
        self.blob(value)?;
        match &value.data {
            ValueData::Blob { file, offset } => self.weights.0[file].shared(*offset),
            ValueData::Immediate(_) => Err(Error::invalid(&self.path, "use: an immediate value has no blob")),
        }
    }

    /// Returns the elements of a tensor value in little-endian storage form, sub-byte types packed.
    ///
    /// # Errors
    /// The value is not a tensor, is a string, or does not come from this package.
    pub fn tensor_bytes<'a>(&'a self, value: &'a Value) -> Result<Cow<'a, [u8]>> {
        let Some(data) = value.tensor_data() else {
            return self.blob(value).map(|b| Cow::Borrowed(b.data));
        };
        Ok(match data {
            TensorData::Bytes(v) => Cow::Borrowed(v),
            TensorData::Floats(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::Doubles(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::LongInts(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::Bools(v) => v.iter().map(|&x| u8::from(x)).collect(),
            TensorData::Ints(v) => match value.ty.tensor().map_or(32, |t| t.dtype.bits()) {
                16 => v.iter().flat_map(|x| (*x as i16).to_le_bytes()).collect(),
                _ => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            },
            TensorData::Strings(_) => {
                return Err(Error::invalid(&self.path, "use: a string has no storage form of fixed size"));
            }
        })
    }
}

/// Collects every blob value of a block and its nested blocks, with its place in words.
fn collect<'a>(block: &'a Block, place: &str, values: &mut Vec<(String, &'a Value)>) {
    for op in &block.operations {
        let here = || format!("function `{place}`, operation `{}` ({})", op.name(), op.op_type);
        for value in op.attributes.values() {
            if matches!(value.data, ValueData::Blob { .. }) {
                values.push((here(), value));
            }
        }
        for Argument(bindings) in op.inputs.values() {
            for binding in bindings {
                if let Binding::Value(value) = binding
                    && matches!(value.data, ValueData::Blob { .. })
                {
                    values.push((here(), value));
                }
            }
        }
        for inner in &op.blocks {
            collect(inner, place, values);
        }
    }
}

fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>> {
    anemoe_io::read_input(path, limit).map_err(|e| Error::io(path, e))
}

/// Checks the manifest's format version: only 1.0.0 is read.
fn check_version(version: &str) -> std::result::Result<(), String> {
    let parts: Option<Vec<u32>> = version.split('.').map(|p| p.parse().ok()).collect();
    match parts.as_deref() {
        Some([1, 0, 0]) => Ok(()),
        Some([_, _, _]) => Err(format!("manifest: format version {version}, 1.0.0 is read")),
        _ => Err(format!("manifest: format version `{version}` is not of the form 1.0.0")),
    }
}

/// Returns `path` if it is not empty and has no `..`, root or prefix.
fn relative(path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    let normal = path.components().all(|c| matches!(c, Component::Normal(_)));
    (normal && !path.as_os_str().is_empty()).then(|| path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mil::builder::{FunctionBuilder, model};
    use crate::mil::{DataType, Opset, TensorType};

    /// Writes a package that computes `y = x * w`, w a blob.
    fn write(target: &Path) -> Result<PackageInfo> {
        let mut writer = PackageWriter::create(target)?;
        let bytes: Vec<u8> = (0..32u8).collect();
        let offset = writer.weights().append(DataType::Float16, 16, &bytes)?;
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let x = f.input("x", TensorType::fixed(DataType::Float16, &[1, 16]))?;
        let w = f.constant("w", Value::blob(DataType::Float16, &[1, 16], offset))?;
        let y = f.mul("y", &x, &w)?;
        f.output(&y)?;
        writer.finish(&model(Opset::CoreML8, vec![("main".into(), f.finish()?)], "main")?)
    }

    #[test]
    fn what_the_writer_does_not_write_is_found() {
        let (dir, path) = sample();
        assert_eq!(foreign_entry(&path).unwrap(), None);
        fs::write(path.join("Data/.DS_Store"), "x").unwrap();
        fs::write(path.join("Data/com.apple.CoreML/._model.mlmodel"), "x").unwrap();
        assert_eq!(foreign_entry(&path).unwrap(), None);
        for name in ["notes.txt", "Data/x", "Data/com.apple.CoreML/weights/other.bin"] {
            fs::write(path.join(name), "x").unwrap();
            assert_eq!(foreign_entry(&path).unwrap(), Some(path.join(name)));
            // A replacement does not lose the entry either.
            let e = PackageWriter::replace(&path).err().unwrap().to_string();
            assert!(e.contains("move it away"), "{e}");
            fs::remove_file(path.join(name)).unwrap();
        }
        fs::create_dir(path.join(".git")).unwrap();
        assert_eq!(foreign_entry(&path).unwrap(), Some(path.join(".git")));
        fs::remove_dir(path.join(".git")).unwrap();
        #[cfg(unix)]
        {
            fs::rename(path.join(MANIFEST), dir.path().join("m")).unwrap();
            std::os::unix::fs::symlink(dir.path().join("m"), path.join(MANIFEST)).unwrap();
            assert_eq!(foreign_entry(&path).unwrap(), Some(path.join(MANIFEST)));
        }
        fs::write(dir.path().join("f.mlpackage"), "x").unwrap();
        assert!(foreign_entry(&dir.path().join("f.mlpackage")).unwrap().is_some());
    }

    fn sample() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.mlpackage");
        write(&path).unwrap();
        (dir, path)
    }

    fn refused(path: &Path, says: &str) {
        let message = Package::open(path).expect_err("a damaged package is refused").to_string();
        assert!(message.contains(says), "`{says}` is not in: {message}");
        assert!(message.contains("p.mlpackage"), "{message}");
    }

    fn edit_manifest(path: &Path, edit: impl FnOnce(String) -> String) {
        let file = path.join(MANIFEST);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, edit(text)).unwrap();
    }

    #[test]
    fn the_same_package_has_the_same_bytes() {
        let ((_a, a), (_b, b)) = (sample(), sample());
        for file in
            [MANIFEST, "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"]
        {
            assert_eq!(fs::read(a.join(file)).unwrap(), fs::read(b.join(file)).unwrap(), "{file}");
        }
        let package = Package::open(&a).unwrap();
        assert_eq!(package.model().functions[0].inputs[0].name, "x");
    }

    #[test]
    fn a_model_in_memory_is_the_package() {
        let (_dir, path) = sample();
        let mut package = Package::open(&path).unwrap();
        let bytes = fs::read(package.model_file()).unwrap();
        let same = Package::of_model(&bytes, &package.model_file()).unwrap();
        assert_eq!(same.model(), package.model());
        assert!(Package::of_model(&bytes, Path::new("elsewhere/model.mlmodel")).is_err());
        // The author's words survive.
        package.model.functions[0].inputs[0].short_description = "Sixteen numbers.".into();
        let bytes = package.model_as_written(true).unwrap();
        assert_eq!(Package::of_model(&bytes, &package.model_file()).unwrap().model(), package.model());
    }

    #[test]
    fn a_writer_that_is_dropped_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("p.mlpackage");
        let mut writer = PackageWriter::create(&target).unwrap();
        writer.weights().append(DataType::UInt8, 3, &[1, 2, 3]).unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn existing_output_is_kept_unless_it_is_to_be_replaced() {
        let (dir, path) = sample();
        assert!(write(&path).unwrap_err().to_string().contains("exists"));
        let mut f = FunctionBuilder::new(Opset::CoreML6);
        let x = f.input("only", TensorType::fixed(DataType::Float16, &[1])).unwrap();
        let y = f.relu("y", &x).unwrap();
        f.output(&y).unwrap();
        let m = model(Opset::CoreML6, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        let info = PackageWriter::replace(&path).unwrap().finish(&m).unwrap();
        assert_eq!(info.weight_bytes, 0);
        assert_eq!(Package::open(&path).unwrap().model(), &m);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_the_functions_that_are_to_run_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.mlpackage");
        let mut writer = PackageWriter::create(&path).unwrap();
        let one = writer.weights().append(DataType::Float16, 2, &[0; 4]).unwrap();
        let function = |broken: bool| {
            let mut f = FunctionBuilder::new(Opset::CoreML8);
            let x = f.input("x", TensorType::fixed(DataType::Float16, &[2])).unwrap();
            let offset = if broken { one + 64 } else { one };
            let w = f.constant("w", Value::blob(DataType::Float16, &[2], offset)).unwrap();
            let y = f.add("y", &x, &w).unwrap();
            f.output(&y).unwrap();
            f.finish().unwrap()
        };
        let functions = vec![("whole".into(), function(false)), ("broken".into(), function(true))];
        writer.finish(&model(Opset::CoreML8, functions, "whole").unwrap()).unwrap();
        assert!(Package::open(&path).unwrap_err().to_string().contains("broken"));
        let names = |p: &Package| p.model().program.functions.keys().cloned().collect::<Vec<_>>();
        let none = Package::open_to_run(&path, &[], &WeightFiles::default()).unwrap();
        assert!(names(&none).is_empty() && none.weights().0.is_empty() && none.model().functions.len() == 2);
        let whole = Package::open_to_run(&path, &["whole", "other"], &WeightFiles::default()).unwrap();
        assert_eq!(names(&whole), ["whole"]);
        // A file that is mapped already is not mapped again.
        let again = Package::open_to_run(&path, &["whole"], whole.weights()).unwrap();
        assert!(whole.weights().0.iter().zip(&again.weights().0).all(|(a, b)| Arc::ptr_eq(a.1, b.1)));
        let mut all = WeightFiles::default();
        all.extend(whole.weights());
        assert_eq!(all.0.len(), 1);
        let broken = Package::open_to_run(&path, &["broken"], &WeightFiles::default()).unwrap_err();
        assert!(broken.to_string().contains("no blob"), "{broken}");
    }

    #[test]
    fn output_folder_that_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let message = write(&dir.path().join("no/p.mlpackage")).unwrap_err().to_string();
        assert!(message.contains("no/p.mlpackage"), "{message}");
        assert!(write(&dir.path().join("p.other")).is_err());
    }

    #[test]
    fn manifest_that_is_not_json() {
        let (_dir, path) = sample();
        edit_manifest(&path, |_| "{\"fileFormatVersion\":".into());
        refused(&path, "manifest");
    }

    #[test]
    fn manifest_of_a_newer_format() {
        let (_dir, path) = sample();
        edit_manifest(&path, |t| t.replace("1.0.0", "2.0.0"));
        refused(&path, "2.0.0");
        edit_manifest(&path, |t| t.replace("2.0.0", "latest"));
        refused(&path, "latest");
    }

    #[test]
    fn manifest_that_leaves_the_package() {
        for bad in ["../../../etc/passwd", "/etc/passwd", "com.apple.CoreML/../../x"] {
            let (_dir, path) = sample();
            edit_manifest(&path, |t| t.replace("com.apple.CoreML/model.mlmodel", bad));
            refused(&path, "leaves the package");
        }
    }

    #[test]
    fn manifest_without_its_root() {
        let (_dir, path) = sample();
        edit_manifest(&path, |t| t.replace("\"rootModelIdentifier\": \"", "\"rootModelIdentifier\": \"x"));
        refused(&path, "root model");
    }

    #[test]
    fn missing_files() {
        let (_dir, path) = sample();
        fs::remove_file(path.join("Data/com.apple.CoreML/weights/weight.bin")).unwrap();
        refused(&path, "weight.bin");
        fs::remove_file(path.join("Data/com.apple.CoreML/model.mlmodel")).unwrap();
        refused(&path, "model.mlmodel");
        fs::remove_file(path.join(MANIFEST)).unwrap();
        refused(&path, "Manifest.json");
    }

    /// Rewrites the model with `value` in place of its weight.
    fn with_weight(path: &Path, value: Value) {
        let file = path.join("Data/com.apple.CoreML/model.mlmodel");
        let mut m = spec::decode(&fs::read(&file).unwrap(), &file).unwrap();
        let ops = &mut m.program.functions.get_mut("main").unwrap().block.operations;
        ops.iter_mut().find(|op| op.name() == "w").unwrap().attributes.insert("val".into(), value);
        fs::write(&file, spec::encode(&m).unwrap()).unwrap();
    }

    #[test]
    fn values_that_lie_about_their_blob() {
        let (_dir, path) = sample();
        with_weight(&path, Value::blob(DataType::Float16, &[1, 16], 4096));
        refused(&path, "no blob at offset 4096");
        with_weight(&path, Value::blob(DataType::Float16, &[1, 17], 64));
        refused(&path, "16 elements");
        with_weight(&path, Value::blob(DataType::Float32, &[1, 16], 64));
        refused(&path, "fp16");
        let mut outside = Value::blob(DataType::Float16, &[1, 16], 64);
        outside.data = ValueData::Blob { file: "@model_path/../../../weight.bin".into(), offset: 64 };
        with_weight(&path, outside);
        refused(&path, "outside the package");
    }

    #[test]
    fn models_that_are_no_programs() {
        let (_dir, path) = sample();
        let file = path.join("Data/com.apple.CoreML/model.mlmodel");
        // Only specificationVersion = 4.
        fs::write(&file, [8, 4]).unwrap();
        refused(&path, "a model of no known kind (specification version 4), not an ML Program");
        for (field, says) in
            [(500, "the older `neuralnetwork`"), (202, "a pipeline"), (403, "a neural network classifier")]
        {
            let mut bytes = vec![8, 4];
            prost::encoding::encode_key(field, prost::encoding::WireType::LengthDelimited, &mut bytes);
            bytes.push(0);
            fs::write(&file, &bytes).unwrap();
            refused(&path, says);
            let single = path.with_file_name("p.mlpackage.mlmodel");
            fs::write(&single, &bytes).unwrap();
            refused(&single, says);
        }
        let compiled = path.with_file_name("p.mlpackage.mlmodelc");
        refused(&compiled, "only Core ML reads");
        let truncated = {
            write(&path.with_file_name("q.mlpackage")).unwrap();
            let good =
                fs::read(path.with_file_name("q.mlpackage").join("Data/com.apple.CoreML/model.mlmodel"))
                    .unwrap();
            good[..good.len() - 7].to_vec()
        };
        fs::write(&file, truncated).unwrap();
        refused(&path, "model specification");
    }

    /// Refuses models that nest messages, blocks or types too deep.
    #[test]
    fn models_that_are_too_deep() {
        let (_dir, path) = sample();
        let file = path.join("Data/com.apple.CoreML/model.mlmodel");
        let field = |number: u32, inner: &[u8]| {
            let mut out = Vec::new();
            prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut out);
            prost::encoding::encode_varint(inner.len() as u64, &mut out);
            out.extend(inner);
            out
        };
        // Operation.blocks = 4 holds a Block, whose operations = 3 hold Operations.
        let mut operation = field(1, b"cond");
        for _ in 0..40 {
            operation = [field(1, b"cond"), field(4, &field(3, &operation))].concat();
        }
        let block = field(3, &operation);
        let specialization = [field(1, b"CoreML8"), field(2, &block)].concat();
        let function = [field(2, b"CoreML8"), field(3, &specialization)].concat();
        let entry = [field(1, b"main"), field(2, &function)].concat();
        fs::write(&file, field(502, &field(2, &entry))).unwrap();
        refused(&path, "invalid");
        // A type of a type of a type, and so on: deeper than the message reader follows.
        let mut ty = Vec::new();
        for _ in 0..100_000 {
            ty = [&[0x0a][..], &[0x80, 0x01], &ty[..ty.len().min(64)]].concat();
        }
        fs::write(&file, field(502, &ty)).unwrap();
        assert!(Package::open(&path).is_err());
    }
}
