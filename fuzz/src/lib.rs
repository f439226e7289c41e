//! Parts that fuzz targets share: files for readers that take a path, and checkpoints without files.

use anemoe_convert::checkpoint::{Checkpoint, TensorInfo, TensorSource};
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_mlpackage::mil::{Block, MlModel};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Line between the files of an input that stands for several. `xtask fuzz` writes the same.
pub const SEPARATOR: &[u8] = b"\n--8<--\n";

/// Elements that a target reads of a tensor; a larger one says nothing more about a reader.
const MAX_ELEMENTS: u64 = 1 << 12;

/// Splits an input into its files.
pub fn files(input: &[u8]) -> Vec<&[u8]> {
    let mut files = Vec::new();
    let mut rest = input;
    while let Some(at) = rest.windows(SEPARATOR.len()).position(|w| w == SEPARATOR) {
        files.push(&rest[..at]);
        rest = &rest[at + SEPARATOR.len()..];
    }
    files.push(rest);
    files
}

/// Returns the folder of this process for files, in memory where `TMPDIR` is.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("anemoe-fuzz-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder for files");
        path
    })
}

/// Writes a file of [`folder`] and gives its path. Folders above it are made when they are missing.
pub fn write(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    if fs::write(&path, bytes).is_err() {
        fs::create_dir_all(path.parent().expect("a file in a folder")).expect("a folder for files");
        fs::write(&path, bytes).expect("a file");
    }
    path
}

/// Writes a package and gives its path; a file that is not given is not there.
pub fn write_package(manifest: &[u8], model: &[u8], weights: Option<&[u8]>) -> PathBuf {
    write("m.mlpackage/Manifest.json", manifest);
    write("m.mlpackage/Data/com.apple.CoreML/model.mlmodel", model);
    let blob = "m.mlpackage/Data/com.apple.CoreML/weights/weight.bin";
    match weights {
        Some(bytes) => {
            write(blob, bytes);
        }
        None => {
            let _ = fs::remove_file(folder().join(blob));
        }
    }
    folder().join("m.mlpackage")
}

/// Reads every tensor of a checkpoint, at its start and at its end.
pub fn read_tensors(source: &dyn TensorSource) {
    let mut out = Vec::new();
    for info in source.tensors() {
        let elements = info.elements();
        let n = elements.min(MAX_ELEMENTS);
        out.resize(n as usize, 0f32);
        for start in [0, elements - n] {
            let _ = source.read(&info.name, start..start + n, &mut out);
        }
    }
}

/// Opens the family of a checkpoint and plans it, with and without other options.
pub fn plan(checkpoint: Checkpoint) {
    let Ok(family) = models::open(checkpoint) else { return };
    let options = PlanOptions::default();
    let one = PlanOptions { experts_per_shard: Some(1), max_context: Some(64), ..options.clone() };
    for options in [options, one] {
        let _ = family.plan(&options);
    }
}

/// A checkpoint's tensors without their values.
#[derive(Clone)]
struct Shapes {
    path: PathBuf,
    tensors: Vec<TensorInfo>,
}

impl TensorSource for Shapes {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn read(&self, _: &str, _: Range<u64>, out: &mut [f32]) -> anemoe_convert::Result<()> {
        out.fill(0.5);
        Ok(())
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens this `config.json` over the tensors of each of these fixtures, and plans it.
pub fn config(text: &[u8], fixtures: &[&str]) {
    static SHAPES: OnceLock<Vec<Shapes>> = OnceLock::new();
    let all = SHAPES.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
        let shapes = |name: &&str| {
            // As they are stored: what a layout is called in the family's table depends on the configuration.
            let paths = [root.join(name).join("model.safetensors")];
            let parts = [1, 2].map(|i| root.join(name).join(format!("model-0000{i}-of-00002.safetensors")));
            let found = if paths[0].exists() { &paths[..] } else { &parts[..] };
            let mut tensors = Vec::new();
            for path in found {
                let source = anemoe_convert::checkpoint::open_safetensors(path).expect("a fixture");
                tensors.extend(source.tensors().to_vec());
            }
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            Shapes { path: root.join(name), tensors }
        };
        fixtures.iter().map(shapes).collect()
    });
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(text) else { return };
    for shapes in all {
        let checkpoint = Checkpoint {
            name: "fuzz".into(),
            path: shapes.path.clone(),
            config: value.clone(),
            generation_config: None,
            source: Box::new(shapes.clone()),
            variants: Default::default(),
            remarks: Vec::new(),
        };
        if let Ok(checkpoint) = models::normalize_layout(checkpoint) {
            plan(checkpoint);
        }
    }
}

/// Elements of every value that a program computes; nothing where a type leaves one open.
pub fn elements(model: &MlModel) -> Option<u64> {
    fn of(block: &Block) -> Option<u64> {
        let mut sum = 0u64;
        for op in &block.operations {
            for output in &op.outputs {
                sum = sum.checked_add(output.ty.tensor()?.elements()?)?;
            }
            for block in &op.blocks {
                sum = sum.checked_add(of(block)?)?;
            }
        }
        Some(sum)
    }
    model.program.functions.values().try_fold(0u64, |sum, f| sum.checked_add(of(&f.block)?))
}
