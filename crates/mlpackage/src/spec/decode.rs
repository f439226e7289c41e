//! Decodes models from protobuf and checks everything that later code relies on.

use super::{COLOR_SPACES, DATA_TYPES, FEATURE_TYPES, MAX_DEPTH, METADATA_FIELDS, OTHER_MODELS};
use crate::mil::{
    Argument, Binding, Block, ColorSpace, DataType, Dim, Feature, FeatureKind, FeatureShape, Function,
    FunctionDescription, Immediate, MlModel, NamedType, Operation, Opset, Program, TensorData, TensorType,
    Value, ValueData, ValueType,
};
use crate::proto as pb;
use crate::{Error, Result};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Decodes a serialized `model.mlmodel`; errors name `path`.
///
/// # Errors
/// The bytes are not a model, the model is not an ML Program (*unsupported*), or it breaks the format's rules: the error
/// names the function and the operation. Nesting is limited, so that no input overflows the stack.
pub fn decode(bytes: &[u8], path: &Path) -> Result<MlModel> {
    decode_some(bytes, path, None)
}

/// Decodes a model like [`decode`]. With `wanted`, it decodes functions of these names only; a wanted function that the
/// program lacks is absent from the result.
///
/// # Errors
/// Fails like [`decode`].
pub fn decode_some(bytes: &[u8], path: &Path, wanted: Option<&[&str]>) -> Result<MlModel> {
    // prost itself refuses messages nested more than 100 deep.
    let model =
        Outline::decode(bytes).map_err(|e| Error::invalid(path, format!("model specification: {e}")))?;
    if model.ml_program.is_none() {
        let kind = other_kind(bytes).unwrap_or("a model of no known kind");
        let older = match kind.contains("neural network") {
            true => ": convert it again, with convert_to=\"mlprogram\" in place of the older `neuralnetwork`",
            false => "",
        };
        let version = model.specification_version;
        let what = format!("model: {kind} (specification version {version}), not an ML Program{older}");
        return Err(Error::unsupported(path, what));
    }
    let reader = MilReader { path };
    reader.model(model, wanted)
}

/// Names the kind of a model that is not an ML Program, by its field; `None` for kinds that are not known.
fn other_kind(mut bytes: &[u8]) -> Option<&'static str> {
    while !bytes.is_empty() {
        let (field, wire) = prost::encoding::decode_key(&mut bytes).ok()?;
        if let Some((_, name)) = OTHER_MODELS.iter().find(|(number, _)| *number == field) {
            return Some(name);
        }
        prost::encoding::skip_field(wire, field, &mut bytes, prost::encoding::DecodeContext::default())
            .ok()?;
    }
    None
}

/// `CoreML.Specification.Model` whose functions stay encoded, since most may not be needed.
#[derive(Clone, PartialEq, prost::Message)]
struct Outline {
    #[prost(int32, tag = "1")]
    specification_version: i32,
    #[prost(message, optional, tag = "2")]
    description: Option<pb::ModelDescription>,
    #[prost(message, optional, tag = "502")]
    ml_program: Option<ProgramOutline>,
}

/// `CoreML.Specification.MILSpec.Program`.
#[derive(Clone, PartialEq, prost::Message)]
struct ProgramOutline {
    #[prost(btree_map = "string, bytes", tag = "2")]
    functions: BTreeMap<String, Vec<u8>>,
    #[prost(btree_map = "string, message", tag = "4")]
    attributes: BTreeMap<String, pb::Value>,
}

struct MilReader<'a> {
    path: &'a Path,
}

/// A decoded value, or the fault in words; callers add the place.
type Decoded<T> = std::result::Result<T, String>;

impl MilReader<'_> {
    fn invalid(&self, what: impl Into<String>) -> Error {
        Error::invalid(self.path, what)
    }

    fn model(&self, model: Outline, wanted: Option<&[&str]>) -> Result<MlModel> {
        let program = model.ml_program.unwrap_or_default();
        let mut functions = BTreeMap::new();
        if program.functions.is_empty() {
            return Err(self.invalid("program: no function"));
        }
        let known: BTreeSet<String> = program.functions.keys().cloned().collect();
        for (name, function) in program.functions {
            if wanted.is_some_and(|wanted| !wanted.contains(&name.as_str())) {
                continue;
            }
            let read = pb::Function::decode(function.as_slice())
                .map_err(|e| format!("model specification: {e}"))
                .and_then(|function| self.function(function))
                .map_err(|e| self.invalid(format!("function `{name}`: {e}")))?;
            functions.insert(name, read);
        }
        let attributes = values(program.attributes)
            .map_err(|e| self.invalid(format!("attributes of the program: {e}")))?;
        let description = model.description.unwrap_or_default();
        let metadata = metadata(description.metadata);
        let mut described = Vec::new();
        let mut default_function = description.default_function_name;
        if description.functions.is_empty() {
            described.push(self.features(pb::FunctionDescription {
                name: "main".into(),
                input: description.input,
                output: description.output,
                predicted_feature_name: description.predicted_feature_name,
                predicted_probabilities_name: description.predicted_probabilities_name,
                state: description.state,
            })?);
            default_function = "main".into();
        } else {
            for f in description.functions {
                described.push(self.features(f)?);
            }
        }
        for f in &described {
            if !known.contains(&f.name) {
                return Err(self.invalid(format!("description: function `{}` is not in the program", f.name)));
            }
        }
        if !known.contains(&default_function) {
            return Err(self.invalid(format!(
                "description: default function `{default_function}` is not in the program"
            )));
        }
        Ok(MlModel {
            specification_version: model.specification_version,
            functions: described,
            default_function,
            metadata,
            program: Program { functions, attributes },
        })
    }

    fn features(&self, f: pb::FunctionDescription) -> Result<FunctionDescription> {
        let read = |list: Vec<pb::FeatureDescription>| -> Result<Vec<Feature>> {
            let one = |feature: pb::FeatureDescription| {
                let place = format!("feature `{}` of function `{}`", feature.name, f.name);
                self::feature(feature).map_err(|e| self.invalid(format!("{place}: {e}")))
            };
            list.into_iter().map(one).collect()
        };
        Ok(FunctionDescription {
            inputs: read(f.input)?,
            outputs: read(f.output)?,
            states: read(f.state)?,
            predicted_feature: f.predicted_feature_name,
            predicted_probabilities: f.predicted_probabilities_name,
            name: f.name,
        })
    }

    fn function(&self, f: pb::Function) -> Decoded<Function> {
        let opset = Opset::from_name(&f.opset).ok_or_else(|| format!("unknown opset `{}`", f.opset))?;
        let mut blocks = f.block_specializations.into_iter();
        let (key, block) = blocks.next().ok_or("no block")?;
        if blocks.next().is_some() {
            return Err("several block specializations, expected one".into());
        }
        if key != f.opset {
            return Err(format!("block for opset `{key}` in a function of opset `{}`", f.opset));
        }
        let inputs = f.inputs.into_iter().map(named_type).collect::<Decoded<_>>()?;
        Ok(Function { inputs, opset, block: read_block(block, 0)? })
    }
}

fn metadata(m: Option<pb::Metadata>) -> BTreeMap<String, String> {
    let Some(m) = m else { return BTreeMap::new() };
    let mut fields = m.user_defined;
    for (name, value) in
        METADATA_FIELDS.iter().zip([m.author, m.license, m.short_description, m.version_string])
    {
        if !value.is_empty() {
            fields.insert(name.to_string(), value);
        }
    }
    fields
}

fn unsigned(shape: &[i64]) -> Decoded<Vec<u64>> {
    shape.iter().map(|&n| u64::try_from(n).map_err(|_| format!("negative dimension {n}"))).collect()
}

fn feature(f: pb::FeatureDescription) -> Decoded<Feature> {
    use pb::dictionary_feature_type::KeyType;
    use pb::feature_type::Type;
    use pb::sequence_feature_type::Type as Element;
    let ty = f.r#type.unwrap_or_default();
    let plain = |kind: FeatureKind, dtype: DataType| Feature {
        kind,
        short_description: f.short_description.clone(),
        ..Feature::array(f.name.as_str(), dtype, FeatureShape::Dynamic)
    };
    let (dtype, shape, default) = match ty.r#type.ok_or("no type")? {
        Type::MultiArrayType(array) => array_type(array)?,
        Type::StateType(state) => array_type(state.array_type.ok_or("a state without an array type")?)?,
        Type::ImageType(image) => {
            let (color, shape) = image_type(image)?;
            // The program may take the pixels as another float type; callers give them as numbers.
            let dtype = match color {
                ColorSpace::GrayscaleFloat16 => DataType::Float16,
                _ => DataType::Float32,
            };
            return Ok(Feature { shape, ..plain(FeatureKind::Image(color), dtype) });
        }
        Type::Int64Type(_) => return Ok(plain(FeatureKind::Scalar, DataType::Int64)),
        Type::DoubleType(_) => return Ok(plain(FeatureKind::Scalar, DataType::Float64)),
        Type::StringType(_) => return Ok(plain(FeatureKind::Scalar, DataType::String)),
        Type::DictionaryType(dictionary) => {
            let dtype = match dictionary.key_type {
                Some(KeyType::Int64KeyType(_)) => DataType::Int64,
                Some(KeyType::StringKeyType(_)) | None => DataType::String,
            };
            return Ok(plain(FeatureKind::Dictionary, dtype));
        }
        Type::SequenceType(sequence) => {
            let dtype = match sequence.r#type {
                Some(Element::Int64Type(_)) => DataType::Int64,
                Some(Element::StringType(_)) | None => DataType::String,
            };
            return Ok(plain(FeatureKind::Sequence, dtype));
        }
    };
    // An optional input without a default is zero.
    let default = ty.is_optional.then_some(default.unwrap_or(0.0));
    Ok(Feature { default, shape, ..plain(FeatureKind::MultiArray, dtype) })
}

fn image_type(image: pb::ImageFeatureType) -> Decoded<(ColorSpace, FeatureShape)> {
    use pb::image_feature_type::SizeFlexibility;
    let color = COLOR_SPACES.iter().find(|(_, n)| *n == image.color_space).map(|(color, _)| *color);
    let color = color.ok_or_else(|| format!("unknown color space {}", image.color_space))?;
    let planes = |height, width| vec![1, color.channels(), height, width];
    let own = match unsigned(&[image.height, image.width])?[..] {
        [height, width] if height > 0 && width > 0 => Some(planes(height, width)),
        _ => None,
    };
    let shape = match image.size_flexibility {
        None => FeatureShape::Fixed(own.ok_or("an image without a size")?),
        Some(SizeFlexibility::EnumeratedSizes(e)) => {
            enumerated(own, e.sizes.iter().map(|s| planes(s.height, s.width)).collect())?
        }
        Some(SizeFlexibility::ImageSizeRange(r)) => {
            let one = |n| pb::SizeRange { lower_bound: n, upper_bound: n as i64 };
            let any = pb::SizeRange { lower_bound: 1, upper_bound: -1 };
            let (height, width) = (r.height_range.unwrap_or(any), r.width_range.unwrap_or(any));
            ranged(own, &[one(1), one(color.channels()), height, width])?
        }
    };
    Ok((color, shape))
}

/// Makes the shapes that a feature lists; the default comes first.
fn enumerated(default: Option<Vec<u64>>, mut shapes: Vec<Vec<u64>>) -> Decoded<FeatureShape> {
    let rank = shapes.first().ok_or("no enumerated shape")?.len();
    if shapes.iter().any(|s| s.len() != rank) {
        return Err("enumerated shapes of different rank".into());
    }
    if let Some(i) = shapes.iter().position(|s| Some(s) == default.as_ref()) {
        shapes[..=i].rotate_right(1);
    }
    Ok(FeatureShape::Enumerated(shapes))
}

/// Makes a shape of ranges; the lower bounds are the default where there is no other.
fn ranged(default: Option<Vec<u64>>, ranges: &[pb::SizeRange]) -> Decoded<FeatureShape> {
    let bound = |s: &pb::SizeRange| (s.lower_bound, u64::try_from(s.upper_bound).ok());
    let ranges: Vec<(u64, Option<u64>)> = ranges.iter().map(bound).collect();
    let default = default.unwrap_or_else(|| ranges.iter().map(|(low, _)| *low).collect());
    if ranges.len() != default.len() {
        return Err(format!("{} ranges for {} dimensions", ranges.len(), default.len()));
    }
    let reversed = |(low, high): &(u64, Option<u64>)| Some((*low, high.filter(|h| h < low)?));
    if let Some((low, high)) = ranges.iter().find_map(reversed) {
        return Err(format!("range from {low} to {high}"));
    }
    Ok(FeatureShape::Range { default, ranges })
}

/// Returns element type, shapes and default value of an array.
fn array_type(array: pb::ArrayFeatureType) -> Decoded<(DataType, FeatureShape, Option<f64>)> {
    use pb::array_feature_type::{DefaultOptionalValue, ShapeFlexibility};
    let dtype = FEATURE_TYPES
        .iter()
        .find(|(_, n)| *n == array.data_type)
        .map(|(t, _)| *t)
        .ok_or_else(|| format!("unknown element type {}", array.data_type))?;
    // An output without a shape is dynamic, and so is a scalar, whose shape has no dimensions.
    let own = Some(unsigned(&array.shape)?).filter(|shape| !shape.is_empty());
    let shape = match array.shape_flexibility {
        None => own.map_or(FeatureShape::Dynamic, FeatureShape::Fixed),
        Some(ShapeFlexibility::EnumeratedShapes(e)) => {
            enumerated(own, e.shapes.iter().map(|s| unsigned(&s.shape)).collect::<Decoded<_>>()?)?
        }
        Some(ShapeFlexibility::ShapeRange(r)) => ranged(own, &r.size_ranges)?,
    };
    let default = array.default_optional_value.map(|value| match value {
        DefaultOptionalValue::IntDefaultValue(v) => f64::from(v),
        DefaultOptionalValue::FloatDefaultValue(v) => f64::from(v),
        DefaultOptionalValue::DoubleDefaultValue(v) => v,
    });
    Ok((dtype, shape, default))
}

fn read_block(b: pb::Block, depth: usize) -> Decoded<Block> {
    if depth > MAX_DEPTH {
        return Err(format!("blocks nested more than {MAX_DEPTH} deep"));
    }
    let inputs = b.inputs.into_iter().map(named_type).collect::<Decoded<_>>()?;
    let mut operations = Vec::with_capacity(b.operations.len());
    for op in b.operations {
        let name = op.outputs.first().map(|o| o.name.clone()).unwrap_or_default();
        let op_type = op.r#type.clone();
        operations.push(operation(op, depth).map_err(|e| format!("operation `{name}` ({op_type}): {e}"))?);
    }
    Ok(Block { inputs, operations, outputs: b.outputs })
}

fn operation(op: pb::Operation, depth: usize) -> Decoded<Operation> {
    if op.r#type.is_empty() {
        return Err("no type".into());
    }
    let mut inputs = BTreeMap::new();
    for (name, a) in op.inputs {
        let bindings = a.arguments.into_iter().map(binding).collect::<Decoded<Vec<_>>>();
        inputs.insert(name.clone(), Argument(bindings.map_err(|e| format!("parameter `{name}`: {e}"))?));
    }
    Ok(Operation {
        // Only text forms and plan reports write an opset prefix; accepting one here is harmless.
        op_type: match op.r#type.split_once('.') {
            Some((prefix, rest)) if prefix.starts_with("ios") => rest.to_string(),
            _ => op.r#type,
        },
        inputs,
        outputs: op.outputs.into_iter().map(named_type).collect::<Decoded<_>>()?,
        blocks: op.blocks.into_iter().map(|b| read_block(b, depth + 1)).collect::<Decoded<_>>()?,
        attributes: values(op.attributes)?,
    })
}

fn binding(b: pb::argument::Binding) -> Decoded<Binding> {
    use pb::argument::binding::Binding as Kind;
    match b.binding {
        Some(Kind::Name(name)) => Ok(Binding::Name(name)),
        Some(Kind::Value(v)) => Ok(Binding::Value(value(v, 0)?)),
        None => Err("an empty binding".into()),
    }
}

fn named_type(t: pb::NamedValueType) -> Decoded<NamedType> {
    let ty = t.r#type.ok_or_else(|| format!("`{}` has no type", t.name))?;
    let ty = value_type(ty, 0).map_err(|e| format!("type of `{}`: {e}", t.name))?;
    Ok(NamedType { name: t.name, ty })
}

fn dimension(d: &pb::Dimension) -> Decoded<Dim> {
    use pb::dimension::Dimension;
    match &d.dimension {
        Some(Dimension::Constant(c)) => Ok(Dim::Fixed(c.size)),
        Some(Dimension::Unknown(u)) => Ok(if u.variadic { Dim::Variadic } else { Dim::Unknown }),
        None => Err("a dimension without a size".into()),
    }
}

fn tensor_type(t: pb::TensorType) -> Decoded<TensorType> {
    let dtype = DATA_TYPES
        .iter()
        .find(|(_, n)| *n == t.data_type)
        .map(|(d, _)| *d)
        .ok_or_else(|| format!("unknown data type {}", t.data_type))?;
    if t.rank != t.dimensions.len() as i64 {
        return Err(format!("rank {} with {} dimensions", t.rank, t.dimensions.len()));
    }
    let dims = t.dimensions.iter().map(dimension).collect::<Decoded<_>>()?;
    Ok(TensorType { dtype, dims })
}

fn value_type(t: pb::ValueType, depth: usize) -> Decoded<ValueType> {
    use pb::value_type::Type;
    if depth > MAX_DEPTH {
        return Err(format!("types nested more than {MAX_DEPTH} deep"));
    }
    let inner = |t: Option<Box<pb::ValueType>>| match t {
        Some(t) => value_type(*t, depth + 1).map(Box::new),
        None => Err("an incomplete type".to_string()),
    };
    match t.r#type {
        Some(Type::TensorType(t)) => Ok(ValueType::Tensor(tensor_type(t)?)),
        Some(Type::StateType(s)) => match *inner(s.wrapped_type)? {
            ValueType::Tensor(t) => Ok(ValueType::State(t)),
            other => Err(format!("a state of {other}, expected a tensor")),
        },
        Some(Type::ListType(l)) => {
            let length = l.length.as_ref().map_or(Ok(Dim::Unknown), dimension)?;
            Ok(ValueType::List { element: inner(l.r#type)?, length })
        }
        Some(Type::TupleType(t)) => Ok(ValueType::Tuple(
            t.types.into_iter().map(|t| value_type(t, depth + 1)).collect::<Decoded<_>>()?,
        )),
        Some(Type::DictionaryType(d)) => {
            Ok(ValueType::Dictionary { key: inner(d.key_type)?, value: inner(d.value_type)? })
        }
        None => Err("no type".into()),
    }
}

fn values(map: BTreeMap<String, pb::Value>) -> Decoded<BTreeMap<String, Value>> {
    let mut out = BTreeMap::new();
    for (name, v) in map {
        let v = value(v, 0).map_err(|e| format!("attribute `{name}`: {e}"))?;
        out.insert(name, v);
    }
    Ok(out)
}

fn value(v: pb::Value, depth: usize) -> Decoded<Value> {
    use pb::value::Value as Kind;
    use pb::value::immediate_value::Value as Im;
    if depth > MAX_DEPTH {
        return Err(format!("values nested more than {MAX_DEPTH} deep"));
    }
    let ty = value_type(v.r#type.ok_or("a value without a type")?, 0)?;
    let many =
        |list: Vec<pb::Value>| list.into_iter().map(|v| value(v, depth + 1)).collect::<Decoded<Vec<_>>>();
    let data = match v.value {
        Some(Kind::BlobFileValue(b)) => ValueData::Blob { file: b.file_name, offset: b.offset },
        Some(Kind::ImmediateValue(i)) => ValueData::Immediate(match i.value {
            Some(Im::Tensor(t)) => Immediate::Tensor(tensor_data(t)?),
            Some(Im::Tuple(t)) => Immediate::Tuple(many(t.values)?),
            Some(Im::List(l)) => Immediate::List(many(l.values)?),
            Some(Im::Dictionary(d)) => {
                let mut pairs = Vec::new();
                for pair in d.values {
                    let (Some(k), Some(v)) = (pair.key, pair.value) else {
                        return Err("a dictionary entry without key or value".into());
                    };
                    pairs.push((value(k, depth + 1)?, value(v, depth + 1)?));
                }
                Immediate::Dictionary(pairs)
            }
            None => return Err("an immediate value without content".into()),
        }),
        None => return Err("a value without content".into()),
    };
    let value = Value { ty, data };
    check_value(&value)?;
    Ok(value)
}

/// Checks a value: its type has a fixed size, and immediate data has the type's length and lies in the field that
/// belongs to the type.
fn check_value(v: &Value) -> Decoded<()> {
    let ValueType::Tensor(ty) = &v.ty else {
        return match &v.data {
            ValueData::Blob { .. } => Err(format!("a blob of type {}, expected a tensor", v.ty)),
            ValueData::Immediate(Immediate::Tensor(_)) => Err(format!("tensor data of type {}", v.ty)),
            ValueData::Immediate(_) => Ok(()),
        };
    };
    let elements =
        ty.elements().ok_or_else(|| format!("constant of type {ty}: its size is unknown or overflows"))?;
    let bytes =
        ty.dtype.packed_bytes(elements).ok_or_else(|| format!("constant of type {ty} is too large"))?;
    let data = match &v.data {
        ValueData::Blob { .. } => return Ok(()),
        ValueData::Immediate(Immediate::Tensor(data)) => data,
        ValueData::Immediate(_) => return Err(format!("constant of type {ty} without tensor data")),
    };
    use DataType as T;
    let (fits, found, wanted) = match data {
        TensorData::Floats(d) => (ty.dtype == T::Float32, d.len(), elements),
        TensorData::Ints(d) => (matches!(ty.dtype, T::Int32 | T::Int16 | T::UInt16), d.len(), elements),
        TensorData::Bools(d) => (ty.dtype == T::Bool, d.len(), elements),
        TensorData::Strings(d) => (ty.dtype == T::String, d.len(), elements),
        TensorData::LongInts(d) => (matches!(ty.dtype, T::Int64 | T::UInt64), d.len(), elements),
        TensorData::Doubles(d) => (ty.dtype == T::Float64, d.len(), elements),
        TensorData::Bytes(d) => {
            let own_field = matches!(
                ty.dtype,
                T::Bool | T::String | T::Float32 | T::Float64 | T::Int32 | T::Int64 | T::UInt64
            );
            (!own_field, d.len(), bytes)
        }
    };
    if !fits {
        return Err(format!("constant of type {ty} has its data in a field of another type"));
    }
    if found as u64 != wanted {
        return Err(format!(
            "constant of type {ty} has {found} elements or bytes of data, expected {wanted}"
        ));
    }
    Ok(())
}

fn tensor_data(t: pb::TensorValue) -> Decoded<TensorData> {
    use pb::tensor_value::Value as Kind;
    Ok(match t.value {
        Some(Kind::Floats(v)) => TensorData::Floats(v.values),
        Some(Kind::Ints(v)) => TensorData::Ints(v.values),
        Some(Kind::Bools(v)) => TensorData::Bools(v.values),
        Some(Kind::Strings(v)) => TensorData::Strings(v.values),
        Some(Kind::LongInts(v)) => TensorData::LongInts(v.values),
        Some(Kind::Doubles(v)) => TensorData::Doubles(v.values),
        Some(Kind::Bytes(v)) => TensorData::Bytes(v.values),
        None => return Err("tensor data without content".into()),
    })
}
