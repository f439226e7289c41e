//! Runs one package on arrays and pictures from files.

mod picture;

use crate::cpu::{ClassLabel, Classifier, CompiledFunction, CpuPackage, CpuStates, Options, Precision};
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_io::split_once;
use anemoe_mlpackage::mil::{DataType, Feature, FeatureKind, FeatureShape};
use anemoe_npz::{Array, ArrayData, read_npy, read_npz_within, write_npz};
use half::f16;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Prefix of a state's key in an archive.
const STATE: &str = "state:";
/// Most bytes that a function's inputs and states justify in an archive; a longer archive may hold as many bytes as it has.
const MAX_JUSTIFIED: u64 = 1 << 30;

/// A file that gives inputs of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum InputFile {
    /// Archive with an array per input, and `state:NAME` for the initial value of a state.
    Archive(PathBuf),
    /// One input: a picture (PNG or JPEG), or an array (`.npy`). Without a name, the only image input.
    Single {
        /// Name of the input.
        input: Option<String>,
        /// Path of the file.
        path: PathBuf,
    },
}

impl InputFile {
    /// Reads `NAME=FILE`, the path of a picture, or the path of an archive.
    pub fn parse(text: &Path) -> InputFile {
        let ends = |path: &Path, all: &[&str]| {
            path.extension().is_some_and(|e| all.iter().any(|known| e.eq_ignore_ascii_case(known)))
        };
        const PICTURES: [&str; 3] = ["png", "jpg", "jpeg"];
        if !ends(text, &["npz"])
            && let Some((name, file)) = split_once(text, b'=')
            && let Some(name) = name.to_str().filter(|name| !name.contains(['/', '\\']))
        {
            return InputFile::Single { input: Some(name.into()), path: file };
        }
        match ends(text, &PICTURES) {
            true => InputFile::Single { input: None, path: text.into() },
            false => InputFile::Archive(text.into()),
        }
    }

    /// Cuts a list of files into steps: a step ends before a file that gives what it has already.
    pub fn steps(files: impl IntoIterator<Item = InputFile>) -> Vec<Vec<InputFile>> {
        let same = |a: &InputFile, b: &InputFile| match (a, b) {
            (InputFile::Archive(_), InputFile::Archive(_)) => true,
            (InputFile::Single { input: a, .. }, InputFile::Single { input: b, .. }) => a == b,
            _ => false,
        };
        let mut steps: Vec<Vec<InputFile>> = vec![Vec::new()];
        for file in files {
            if steps.last().is_some_and(|step| step.iter().any(|other| same(&file, other))) {
                steps.push(Vec::new());
            }
            steps.last_mut().expect("a list that is never empty").push(file);
        }
        steps
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        match self {
            InputFile::Archive(path) | InputFile::Single { path, .. } => path,
        }
    }
}

/// A run of a package over several sets of inputs, in order, with states carried over.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// Path of the package.
    pub package: PathBuf,
    /// Name of the function; the default one if absent.
    pub function: Option<String>,
    /// Rounding of results.
    pub precision: Precision,
    /// Inputs of each step.
    pub inputs: Vec<Vec<InputFile>>,
    /// Path of the outputs: an archive, or a `.png` for an image. `{}` becomes the step's number; without `{}` only the last
    /// step is written.
    pub outputs: Option<PathBuf>,
}

/// Results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResults {
    /// Path of the file that was written; none for a step that was not.
    pub path: Option<PathBuf>,
    /// Names and shapes of the arrays.
    pub arrays: Vec<(String, Vec<usize>)>,
    /// Classes that a classifier found.
    pub classes: Option<PredictedClasses>,
}

/// Classes that a classifier found, the most probable one first.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictedClasses {
    /// Output with the most probable class.
    pub label: String,
    /// Output with the probabilities.
    pub probabilities: String,
    /// Classes with their probabilities.
    pub ranked: Vec<(ClassLabel, f32)>,
}

impl Prediction {
    /// Returns the paths of the files that [`Prediction::run`] writes, in order.
    pub fn targets(&self) -> Vec<PathBuf> {
        (0..self.inputs.len()).filter_map(|step| self.target(step)).collect()
    }

    /// Returns the path that a step's results are written to.
    fn target(&self, step: usize) -> Option<PathBuf> {
        let outputs = self.outputs.as_deref()?;
        let every = outputs.to_string_lossy().contains("{}");
        (every || step + 1 == self.inputs.len()).then(|| numbered(outputs, step))
    }

    /// Runs every step and writes outputs and states. Returns the results of each step.
    ///
    /// # Errors
    /// The package or a file is missing or invalid, an array does not fit its input, or an operation fails.
    pub fn run(&self) -> Result<Vec<StepResults>> {
        let package = CpuPackage::open(&self.package)?;
        let function = self.function.as_deref();
        let (classifier, described) = (package.classifier(function)?, package.description(function)?);
        let options = Options { precision: self.precision, ..Options::default() };
        let function = package.compile(function, options)?;
        let mut states = CpuStates::new(&function);
        let mut outputs = Vec::new();
        let mut all = Vec::new();
        for (step, files) in self.inputs.iter().enumerate() {
            let arrays = read_inputs(&function, files)?;
            let place = files.first().map_or(self.package.as_path(), InputFile::path);
            let inputs = bind(&function, &mut states, arrays, place)?;
            function.run(&inputs.iter().collect::<Vec<_>>(), &mut states, &mut outputs)?;
            let mut entries = results(&function, &outputs, &states, self.precision);
            let classes = match &classifier {
                None => None,
                Some(c) => {
                    let is_output = described.outputs.iter().any(|f| f.name == c.tensor);
                    let found = classify(c, is_output, &mut entries);
                    Some(found.map_err(|what| Error::invalid(&self.package, what))?)
                }
            };
            let path = self.target(step);
            if let Some(target) = &path {
                let is_png = target.extension().is_some_and(|e| e.eq_ignore_ascii_case("png"));
                if is_png {
                    write_picture(target, &described.outputs, &entries)?
                } else {
                    write_npz(target, &entries)?
                }
            }
            let arrays = entries.into_iter().map(|(name, array)| (name, array.shape)).collect();
            all.push(StepResults { path, arrays, classes });
        }
        Ok(all)
    }
}

/// Reads the arrays of a step by input; pictures become what the inputs take.
fn read_inputs(function: &CompiledFunction, files: &[InputFile]) -> Result<BTreeMap<String, Array>> {
    let mut arrays = BTreeMap::new();
    for file in files {
        let InputFile::Single { input, path } = file else {
            arrays.extend(read_npz_within(file.path(), justified_bytes(function))?);
            continue;
        };
        let wrong = |what: String| Error::invalid(path, format!("inputs: {what}"));
        let is_image = |f: &&Feature| matches!(f.kind, FeatureKind::Image(_));
        let mut images = function.inputs().iter().filter(is_image);
        let feature = match input {
            Some(name) => function.inputs().iter().find(|f| f.name == *name).ok_or_else(|| {
                let names: Vec<&str> = function.inputs().iter().map(|f| f.name.as_str()).collect();
                wrong(format!("`{name}` is not an input of the function, which takes {}", names.join(", ")))
            })?,
            None => match (images.next(), images.next()) {
                (Some(only), None) => only,
                (None, _) => return Err(wrong("the function takes no image".into())),
                _ => return Err(wrong("the function takes several images; name one: NAME=FILE".into())),
            },
        };
        let array = match feature.kind {
            _ if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("npy")) => read_npy(path)?,
            FeatureKind::Image(color) => {
                picture::planes(&picture::read(path)?, color, &feature.shape).map_err(wrong)?
            }
            _ => return Err(wrong(format!("input `{}` is no image; give it as an array", feature.name))),
        };
        if arrays.insert(feature.name.clone(), array).is_some() {
            return Err(wrong(format!("input `{}` is given twice", feature.name)));
        }
    }
    Ok(arrays)
}

/// Puts the probabilities of a classifier in place of their tensor, and ranks the classes.
fn classify(
    classifier: &Classifier,
    is_output: bool,
    entries: &mut Vec<(String, Array)>,
) -> std::result::Result<PredictedClasses, String> {
    let Classifier { label, probabilities, tensor, classes } = classifier;
    let place = entries.iter().position(|(name, _)| name == tensor);
    let place = place.ok_or_else(|| format!("no output `{tensor}`"))?;
    let values = entries[place].1.to_f32();
    if values.len() != classes.len() {
        return Err(format!(
            "output `{probabilities}`: {} values for {} classes",
            values.len(),
            classes.len()
        ));
    }
    let mut ranked: Vec<_> = classes.iter().cloned().zip(values.iter().copied()).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let entry = (probabilities.clone(), Array { shape: vec![values.len()], data: values.into() });
    if is_output {
        entries.push(entry)
    } else {
        entries[place] = entry
    }
    Ok(PredictedClasses { label: label.clone(), probabilities: probabilities.clone(), ranked })
}

/// Writes the only image among a function's outputs.
fn write_picture(target: &Path, outputs: &[Feature], entries: &[(String, Array)]) -> Result<()> {
    let color = |f: &Feature| {
        if let FeatureKind::Image(color) = f.kind { Some((f.name.clone(), color)) } else { None }
    };
    let images: Vec<_> = outputs.iter().filter_map(color).collect();
    let [(name, color)] = images.as_slice() else {
        let what =
            format!("{}: the function gives {} images; a .png takes one", target.display(), images.len());
        return Err(Error::usage(what));
    };
    let array = entries.iter().find(|(n, _)| n == name).map(|(_, array)| array);
    let array = array.ok_or_else(|| Error::input(format!("no output `{name}`")))?;
    let png =
        picture::encode(array, *color).map_err(|what| Error::input(format!("output `{name}`: {what}")))?;
    anemoe_io::write_atomic(target, |file| std::io::Write::write_all(file, &png))
        .map_err(|e| Error::io(target, e))
}

/// Returns the bytes that arrays of a function's inputs and states may take: numbers of 8 bytes, and headers.
fn justified_bytes(function: &CompiledFunction) -> u64 {
    const HEADER: u64 = 1 << 10;
    let elements = |shape: &[u64]| shape.iter().fold(1, |n: u64, &d| n.saturating_mul(d));
    let bytes = function.inputs().iter().chain(function.states()).map(|f| {
        let elements = match &f.shape {
            FeatureShape::Fixed(shape) => elements(shape),
            FeatureShape::Enumerated(all) => all.iter().map(|s| elements(s)).max().unwrap_or(0),
            // The upper bounds of a range would justify far more than real inputs have.
            FeatureShape::Range { default, .. } => elements(default),
            FeatureShape::Dynamic => 0,
        };
        elements.saturating_mul(8).saturating_add(HEADER)
    });
    bytes.fold(0, u64::saturating_add).min(MAX_JUSTIFIED)
}

/// Converts arrays to a function's inputs, in its order, and sets states from the arrays `state:NAME`.
pub fn bind(
    function: &CompiledFunction,
    states: &mut CpuStates,
    mut arrays: BTreeMap<String, Array>,
    path: &Path,
) -> Result<Vec<Tensor>> {
    let wrong = |what: String| Error::invalid(path, format!("inputs: {what}"));
    let mut inputs = Vec::new();
    for feature in function.inputs() {
        let tensor = match arrays.remove(&feature.name) {
            Some(array) => to_tensor(array, feature),
            None => default_tensor(feature).ok_or_else(|| {
                let names: Vec<&str> = function.inputs().iter().map(|f| f.name.as_str()).collect();
                wrong(format!("no array `{}`; the function takes {}", feature.name, names.join(", ")))
            })?,
        };
        inputs.push(tensor.map_err(|what| wrong(format!("array `{}`: {what}", feature.name)))?);
    }
    for (name, array) in arrays {
        let Some(state) = name.strip_prefix(STATE) else {
            return Err(wrong(format!("array `{name}` is not an input of the function")));
        };
        let value = Tensor::f32(&array.shape, array.to_f32());
        states.set(state, value).map_err(|e| wrong(e.to_string()))?;
    }
    Ok(inputs)
}

/// Makes the value of an input that is left out; `None` where it has to be given.
fn default_tensor(feature: &Feature) -> Option<std::result::Result<Tensor, String>> {
    let value = feature.default?;
    let shape: Option<Vec<usize>> =
        feature.shape.default().unwrap_or_default().iter().map(|&n| usize::try_from(n).ok()).collect();
    let elements = shape.as_ref().and_then(|shape| shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)));
    let (Some(shape), Some(elements)) = (shape, elements.filter(|&n| n as u64 <= MAX_JUSTIFIED / 4)) else {
        return Some(Err(format!("its default shape {} is too large", feature.shape)));
    };
    Some(Ok(match feature.dtype.is_float() {
        true => Tensor::f32(&shape, vec![value as f32; elements]),
        false => Tensor::i32(&shape, vec![value as i32; elements]),
    }))
}

fn to_tensor(mut array: Array, feature: &Feature) -> std::result::Result<Tensor, String> {
    if let FeatureKind::Dictionary | FeatureKind::Sequence = feature.kind {
        return Err(format!("it stands for a {feature}, which is not implemented"));
    }
    if let FeatureKind::Image(color) = feature.kind {
        if let Some(picture) = picture::of_pixels(&array) {
            array = picture::planes(&picture, color, &feature.shape)?;
        }
        return Ok(Tensor::f32(&array.shape, array.to_f32()));
    }
    let mut shape = array.shape.clone();
    // The description of a scalar has one element; the array may have no axis or one.
    if shape.is_empty() && feature.shape == FeatureShape::Fixed(vec![1]) {
        shape = vec![1];
    }
    if feature.dtype.is_float() {
        return Ok(Tensor::f32(&shape, array.to_f32()));
    }
    let ints: Option<Vec<i32>> =
        array.to_i64().and_then(|v| v.into_iter().map(|v| i32::try_from(v).ok()).collect());
    let ints = ints.ok_or_else(|| format!("a number that is no {}", feature.dtype))?;
    Ok(Tensor::i32(&shape, ints))
}

/// Returns the outputs of a function's run and its states by name, in the types of the package's description. As Core ML does, gives
/// a scalar an axis of one element, and a value that is two outputs once.
pub fn results(
    function: &CompiledFunction,
    outputs: &[Tensor],
    states: &CpuStates,
    precision: Precision,
) -> Vec<(String, Array)> {
    let mut entries: Vec<(String, Array)> = Vec::new();
    for (feature, output) in function.outputs().iter().zip(outputs) {
        if entries.iter().all(|(name, _)| *name != feature.name) {
            let mut array = to_array(output, feature.dtype, precision);
            if array.shape.is_empty() {
                array.shape.push(1);
            }
            entries.push((feature.name.clone(), array));
        }
    }
    for name in states.names() {
        if let Some(value) = states.get(name) {
            entries.push((format!("{STATE}{name}"), to_array(&value, DataType::Float16, precision)));
        }
    }
    entries
}

fn to_array(t: &Tensor, dtype: DataType, precision: Precision) -> Array {
    let data = match &t.data {
        // Without rounding, f32 holds more than fp16 could.
        Data::F32(v) if dtype == DataType::Float16 && precision == Precision::Fp16 => {
            ArrayData::F16(v.iter().map(|&x| f16::from_f32(x)).collect())
        }
        Data::F32(v) => ArrayData::F32(v.clone()),
        Data::I32(v) => ArrayData::I32(v.clone()),
        Data::Bool(v) => ArrayData::Bool(v.clone()),
        Data::Str(_) => ArrayData::I32(Vec::new()),
    };
    Array { shape: t.shape.clone(), data }
}
/// Replaces `{}` by the step's number. Parts of the path that are not UTF-8 stay as they are.
fn numbered(outputs: &Path, step: usize) -> PathBuf {
    let number = |part: &OsStr| match part.to_str() {
        Some(text) => text.replace("{}", &step.to_string()).into(),
        None => part.to_os_string(),
    };
    outputs.components().map(|c| number(c.as_os_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_cut_into_steps() {
        let single = |input: Option<&str>, path: &str| InputFile::Single {
            input: input.map(Into::into),
            path: path.into(),
        };
        let archive = |path: &str| InputFile::Archive(path.into());
        let steps = |files: &[&str]| InputFile::steps(files.iter().map(|f| InputFile::parse(Path::new(f))));
        assert_eq!(steps(&[]), [Vec::<InputFile>::new()]);
        assert_eq!(steps(&["a.npz", "b.npz"]), [vec![archive("a.npz")], vec![archive("b.npz")]]);
        let (a, b) = (single(None, "a.png"), single(None, "b.JPG"));
        assert_eq!(steps(&["a.png", "b.JPG"]), [vec![a], vec![b]]);
        let (left, right) = (single(Some("left"), "x.png"), single(Some("right"), "x=y.npy"));
        assert_eq!(
            steps(&["left=x.png", "a.npz", "right=x=y.npy", "left=x.png"]),
            [vec![left.clone(), archive("a.npz"), right], vec![left]]
        );
        // A path with `=` in a folder's name, and an archive's.
        assert_eq!(steps(&["d/x=1/a.png"]), [vec![single(None, "d/x=1/a.png")]]);
        assert_eq!(steps(&["x=1.npz"]), [vec![archive("x=1.npz")]]);
    }
}
