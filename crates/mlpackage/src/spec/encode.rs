//! Encodes models as protobuf.

use super::{COLOR_SPACES, DATA_TYPES, FEATURE_TYPES};
use crate::mil::{
    Argument, Binding, Block, DataType, Dim, Feature, FeatureKind, FeatureShape, Function, Immediate,
    MlModel, NamedType, Operation, TensorData, TensorType, Value, ValueData, ValueType,
};
use crate::proto as pb;
use crate::{Error, Result};
use prost::Message;
use std::collections::BTreeMap;

/// Encodes a model as `model.mlmodel`; the same model always gives the same bytes.
///
/// # Errors
/// A feature has a type that features cannot have, or the description and the program name different functions.
pub fn encode(model: &MlModel) -> Result<Vec<u8>> {
    encode_with(model, &model.metadata)
}

/// Encodes a model like [`encode`], with `fields` in place of its own metadata.
///
/// # Errors
/// Fails like [`encode`].
pub fn encode_with(model: &MlModel, fields: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let described: Vec<&str> = model.functions.iter().map(|f| f.name.as_str()).collect();
    for name in &described {
        if !model.program.functions.contains_key(*name) {
            return Err(Error::invalid_program(format!(
                "the description names function `{name}`, the program has none"
            )));
        }
    }
    if described.len() != model.program.functions.len() {
        return Err(Error::invalid_program("the description leaves out a function of the program"));
    }
    let mut description = pb::ModelDescription { metadata: metadata(fields), ..Default::default() };
    match model.functions.as_slice() {
        [only] if only.name == "main" => {
            description.input = features(&only.inputs, false)?;
            description.output = features(&only.outputs, false)?;
            description.state = features(&only.states, true)?;
            description.predicted_feature_name = only.predicted_feature.clone();
            description.predicted_probabilities_name = only.predicted_probabilities.clone();
        }
        several => {
            for f in several {
                description.functions.push(pb::FunctionDescription {
                    name: f.name.clone(),
                    input: features(&f.inputs, false)?,
                    output: features(&f.outputs, false)?,
                    state: features(&f.states, true)?,
                    predicted_feature_name: f.predicted_feature.clone(),
                    predicted_probabilities_name: f.predicted_probabilities.clone(),
                });
            }
            description.default_function_name = model.default_function.clone();
        }
    }
    let program = pb::Program {
        version: 1,
        functions: model.program.functions.iter().map(|(k, f)| (k.clone(), function(f))).collect(),
        attributes: values(&model.program.attributes),
        ..Default::default()
    };
    let model = pb::Model {
        specification_version: model.specification_version,
        description: Some(description),
        is_updatable: false,
        ml_program: Some(program),
    };
    Ok(model.encode_to_vec())
}

fn metadata(fields: &BTreeMap<String, String>) -> Option<pb::Metadata> {
    if fields.is_empty() {
        return None;
    }
    let mut m = pb::Metadata::default();
    for (key, value) in fields {
        match key.as_str() {
            "author" => m.author = value.clone(),
            "license" => m.license = value.clone(),
            "shortDescription" => m.short_description = value.clone(),
            "versionString" => m.version_string = value.clone(),
            _ => {
                m.user_defined.insert(key.clone(), value.clone());
            }
        }
    }
    Some(m)
}

fn signed(shape: &[u64]) -> Vec<i64> {
    shape.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect()
}

fn features(features: &[Feature], state: bool) -> Result<Vec<pb::FeatureDescription>> {
    use pb::feature_type::Type;
    let one = |f: &Feature| -> Result<pb::FeatureDescription> {
        let wrong = || {
            let what = format!("feature `{}` has type {}, which features cannot have", f.name, f.dtype);
            Error::invalid_program(what)
        };
        let (int, text) = (f.dtype == DataType::Int64, f.dtype == DataType::String);
        let ty = match f.kind {
            FeatureKind::MultiArray => {
                let array = array_type(f).ok_or_else(wrong)?;
                match state {
                    true => Type::StateType(pb::StateFeatureType { array_type: Some(array) }),
                    false => Type::MultiArrayType(array),
                }
            }
            FeatureKind::Image(_) => Type::ImageType(image_type(f).ok_or_else(wrong)?),
            FeatureKind::Scalar if int => Type::Int64Type(pb::Other {}),
            FeatureKind::Scalar if text => Type::StringType(pb::Other {}),
            FeatureKind::Scalar if f.dtype == DataType::Float64 => Type::DoubleType(pb::Other {}),
            FeatureKind::Dictionary if int || text => {
                use pb::dictionary_feature_type::KeyType;
                let key = if int { KeyType::Int64KeyType } else { KeyType::StringKeyType };
                Type::DictionaryType(pb::DictionaryFeatureType { key_type: Some(key(pb::Other {})) })
            }
            FeatureKind::Sequence if int || text => {
                use pb::sequence_feature_type::Type as Element;
                let element = if int { Element::Int64Type } else { Element::StringType };
                let ty = Some(element(pb::Other {}));
                Type::SequenceType(pb::SequenceFeatureType { size_range: None, r#type: ty })
            }
            FeatureKind::Scalar | FeatureKind::Dictionary | FeatureKind::Sequence => return Err(wrong()),
        };
        Ok(pb::FeatureDescription {
            name: f.name.clone(),
            short_description: f.short_description.clone(),
            r#type: Some(pb::FeatureType { r#type: Some(ty), is_optional: f.default.is_some() }),
        })
    };
    features.iter().map(one).collect()
}

fn size_range(&(low, high): &(u64, Option<u64>)) -> pb::SizeRange {
    pb::SizeRange { lower_bound: low, upper_bound: high.map_or(-1, |h| i64::try_from(h).unwrap_or(i64::MAX)) }
}

fn array_type(f: &Feature) -> Option<pb::ArrayFeatureType> {
    use pb::array_feature_type as aft;
    let (_, data_type) = *FEATURE_TYPES.iter().find(|(t, _)| *t == f.dtype)?;
    let default_optional_value = f.default.map(|v| match f.dtype {
        DataType::Float64 => aft::DefaultOptionalValue::DoubleDefaultValue(v),
        t if t.is_float() => aft::DefaultOptionalValue::FloatDefaultValue(v as f32),
        _ => aft::DefaultOptionalValue::IntDefaultValue(v as i32),
    });
    let shape_flexibility = match &f.shape {
        FeatureShape::Fixed(_) | FeatureShape::Dynamic => None,
        FeatureShape::Range { ranges, .. } => Some(aft::ShapeFlexibility::ShapeRange(aft::ShapeRange {
            size_ranges: ranges.iter().map(size_range).collect(),
        })),
        FeatureShape::Enumerated(all) => {
            let shapes = all.iter().map(|s| aft::Shape { shape: signed(s) }).collect();
            Some(aft::ShapeFlexibility::EnumeratedShapes(aft::EnumeratedShapes { shapes }))
        }
    };
    let shape = f.shape.default().map(signed).unwrap_or_default();
    Some(pb::ArrayFeatureType { shape, data_type, shape_flexibility, default_optional_value })
}

fn image_type(f: &Feature) -> Option<pb::ImageFeatureType> {
    use pb::image_feature_type as ift;
    let FeatureKind::Image(color) = f.kind else { return None };
    let (_, color_space) = *COLOR_SPACES.iter().find(|(c, _)| *c == color)?;
    let size = |shape: &[u64]| Some(ift::ImageSize { height: *shape.get(2)?, width: *shape.get(3)? });
    let size_flexibility = match &f.shape {
        FeatureShape::Fixed(_) | FeatureShape::Dynamic => None,
        FeatureShape::Range { ranges, .. } => {
            let (height, width) = (size_range(ranges.get(2)?), size_range(ranges.get(3)?));
            let range = ift::ImageSizeRange { width_range: Some(width), height_range: Some(height) };
            Some(ift::SizeFlexibility::ImageSizeRange(range))
        }
        FeatureShape::Enumerated(all) => {
            let sizes = all.iter().map(|s| size(s)).collect::<Option<_>>()?;
            Some(ift::SizeFlexibility::EnumeratedSizes(ift::EnumeratedImageSizes { sizes }))
        }
    };
    let ift::ImageSize { width, height } = size(f.shape.default()?)?;
    Some(pb::ImageFeatureType { width: width as i64, height: height as i64, color_space, size_flexibility })
}

fn function(f: &Function) -> pb::Function {
    let opset = f.opset.name().to_string();
    pb::Function {
        inputs: f.inputs.iter().map(named_type).collect(),
        block_specializations: BTreeMap::from([(opset.clone(), block(&f.block))]),
        opset,
        attributes: BTreeMap::new(),
    }
}

fn block(b: &Block) -> pb::Block {
    pb::Block {
        inputs: b.inputs.iter().map(named_type).collect(),
        outputs: b.outputs.clone(),
        operations: b.operations.iter().map(operation).collect(),
        attributes: BTreeMap::new(),
    }
}

fn operation(op: &Operation) -> pb::Operation {
    pb::Operation {
        r#type: op.op_type.clone(),
        inputs: op.inputs.iter().map(|(k, a)| (k.clone(), argument(a))).collect(),
        outputs: op.outputs.iter().map(named_type).collect(),
        blocks: op.blocks.iter().map(block).collect(),
        attributes: values(&op.attributes),
    }
}

fn argument(a: &Argument) -> pb::Argument {
    use pb::argument::{Binding as PbBinding, binding};
    let one = |b: &Binding| PbBinding {
        binding: Some(match b {
            Binding::Name(name) => binding::Binding::Name(name.clone()),
            Binding::Value(v) => binding::Binding::Value(value(v)),
        }),
    };
    pb::Argument { arguments: a.0.iter().map(one).collect() }
}

fn named_type(t: &NamedType) -> pb::NamedValueType {
    pb::NamedValueType { name: t.name.clone(), r#type: Some(value_type(&t.ty)) }
}

fn data_type(t: DataType) -> i32 {
    DATA_TYPES.iter().find(|(d, _)| *d == t).map_or(0, |(_, n)| *n)
}

fn dimension(d: Dim) -> pb::Dimension {
    use pb::dimension::{ConstantDimension, Dimension, UnknownDimension};
    let dimension = match d {
        Dim::Fixed(size) => Dimension::Constant(ConstantDimension { size }),
        Dim::Unknown => Dimension::Unknown(UnknownDimension { variadic: false }),
        Dim::Variadic => Dimension::Unknown(UnknownDimension { variadic: true }),
    };
    pb::Dimension { dimension: Some(dimension) }
}

fn tensor_type(t: &TensorType) -> pb::TensorType {
    pb::TensorType {
        data_type: data_type(t.dtype),
        rank: t.dims.len() as i64,
        dimensions: t.dims.iter().map(|&d| dimension(d)).collect(),
        attributes: BTreeMap::new(),
    }
}

fn value_type(t: &ValueType) -> pb::ValueType {
    use pb::value_type::Type;
    let boxed = |t: &ValueType| Some(Box::new(value_type(t)));
    let ty = match t {
        ValueType::Tensor(t) => Type::TensorType(tensor_type(t)),
        ValueType::State(t) => Type::StateType(Box::new(pb::StateType {
            wrapped_type: Some(Box::new(pb::ValueType { r#type: Some(Type::TensorType(tensor_type(t))) })),
        })),
        ValueType::List { element, length } => Type::ListType(Box::new(pb::ListType {
            r#type: boxed(element),
            length: Some(dimension(*length)),
        })),
        ValueType::Tuple(types) => {
            Type::TupleType(pb::TupleType { types: types.iter().map(value_type).collect() })
        }
        ValueType::Dictionary { key, value } => Type::DictionaryType(Box::new(pb::DictionaryType {
            key_type: boxed(key),
            value_type: boxed(value),
        })),
    };
    pb::ValueType { r#type: Some(ty) }
}

fn values(map: &BTreeMap<String, Value>) -> BTreeMap<String, pb::Value> {
    map.iter().map(|(k, v)| (k.clone(), value(v))).collect()
}

fn value(v: &Value) -> pb::Value {
    use pb::value::{BlobFileValue, ImmediateValue, Value as Kind};
    let kind = match &v.data {
        ValueData::Blob { file, offset } => {
            Kind::BlobFileValue(BlobFileValue { file_name: file.clone(), offset: *offset })
        }
        ValueData::Immediate(i) => Kind::ImmediateValue(ImmediateValue { value: Some(immediate(i)) }),
    };
    pb::Value { doc_string: String::new(), r#type: Some(value_type(&v.ty)), value: Some(kind) }
}

fn immediate(i: &Immediate) -> pb::value::immediate_value::Value {
    use pb::dictionary_value::KeyValuePair;
    use pb::value::immediate_value::Value as Kind;
    match i {
        Immediate::Tensor(data) => Kind::Tensor(tensor_data(data)),
        Immediate::Tuple(v) => Kind::Tuple(pb::TupleValue { values: v.iter().map(value).collect() }),
        Immediate::List(v) => Kind::List(pb::ListValue { values: v.iter().map(value).collect() }),
        Immediate::Dictionary(pairs) => Kind::Dictionary(pb::DictionaryValue {
            values: pairs
                .iter()
                .map(|(k, v)| KeyValuePair { key: Some(value(k)), value: Some(value(v)) })
                .collect(),
        }),
    }
}

fn tensor_data(data: &TensorData) -> pb::TensorValue {
    use pb::tensor_value as tv;
    let kind = match data {
        TensorData::Floats(v) => tv::Value::Floats(tv::RepeatedFloats { values: v.clone() }),
        TensorData::Ints(v) => tv::Value::Ints(tv::RepeatedInts { values: v.clone() }),
        TensorData::Bools(v) => tv::Value::Bools(tv::RepeatedBools { values: v.clone() }),
        TensorData::Strings(v) => tv::Value::Strings(tv::RepeatedStrings { values: v.clone() }),
        TensorData::LongInts(v) => tv::Value::LongInts(tv::RepeatedLongInts { values: v.clone() }),
        TensorData::Doubles(v) => tv::Value::Doubles(tv::RepeatedDoubles { values: v.clone() }),
        TensorData::Bytes(v) => tv::Value::Bytes(tv::RepeatedBytes { values: v.clone() }),
    };
    pb::TensorValue { value: Some(kind) }
}
