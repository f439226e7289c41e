//! Classifiers: functions whose operation `classify` names the most probable class.

use super::bindings::constant;
use crate::{Error, Result};
use anemoe_mlpackage::mil::{
    Argument, Binding, DataType, Feature, FeatureShape, Function, FunctionDescription, Immediate, TensorData,
    Value, ValueData,
};
use std::fmt;
use std::path::Path;

/// Name of a class.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum ClassLabel {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
}

impl fmt::Display for ClassLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClassLabel::Text(text) => f.write_str(text),
            ClassLabel::Number(n) => write!(f, "{n}"),
        }
    }
}

/// The operation `classify` of a function. It takes no part in the run: its outputs follow from a tensor and the classes.
#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// Output with the most probable class.
    pub label: String,
    /// Output with the probability of each class.
    pub probabilities: String,
    /// Tensor that holds the probabilities, in the order of `classes`.
    pub tensor: String,
    /// Names of the classes.
    pub classes: Vec<ClassLabel>,
}

impl Classifier {
    /// Finds the operation of a function; `None` where it has none.
    pub(super) fn of(body: &Function, path: &Path) -> Result<Option<Classifier>> {
        let mut found = body.block.operations.iter().filter(|op| op.op_type == "classify");
        let Some(op) = found.next() else { return Ok(None) };
        let wrong =
            |what: &str| Error::invalid(path, format!("operation `{}` (classify): {what}", op.name()));
        if found.next().is_some() {
            return Err(wrong("the function has two"));
        }
        let operand = |param: &str| match op.inputs.get(param) {
            Some(Argument(bindings)) if bindings.len() == 1 => Ok(&bindings[0]),
            _ => Err(wrong(&format!("parameter `{param}` has no value"))),
        };
        let Binding::Name(tensor) = operand("probabilities")? else {
            return Err(wrong("the probabilities are constant"));
        };
        let classes = match operand("classes")? {
            Binding::Value(value) => Some(value),
            Binding::Name(name) => constant(&body.block.operations, name),
        };
        let classes =
            classes.and_then(labels).ok_or_else(|| wrong("`classes` is no list of strings or integers"))?;
        let [label, probabilities] = op.outputs.as_slice() else {
            return Err(wrong("two outputs are expected"));
        };
        let (label, probabilities) = (label.name.clone(), probabilities.name.clone());
        Ok(Some(Classifier { label, probabilities, tensor: tensor.clone(), classes }))
    }

    /// Returns the function without the operation: the tensor of probabilities takes the place of its outputs.
    pub(super) fn without(
        &self,
        body: &Function,
        described: &FunctionDescription,
    ) -> (Function, FunctionDescription) {
        let (mut body, mut described) = (body.clone(), described.clone());
        let is_own = |name: &String| *name == self.label || *name == self.probabilities;
        body.block.operations.retain(|op| op.op_type != "classify");
        body.block.outputs.retain(|name| !is_own(name));
        if !body.block.outputs.contains(&self.tensor) {
            body.block.outputs.push(self.tensor.clone());
        }
        described.outputs.retain(|f| !is_own(&f.name));
        if described.outputs.iter().all(|f| f.name != self.tensor) {
            described.outputs.push(Feature::array(&self.tensor, DataType::Float32, FeatureShape::Dynamic));
        }
        (body, described)
    }
}

fn labels(value: &Value) -> Option<Vec<ClassLabel>> {
    let of_data = |data: &TensorData| match data {
        TensorData::Strings(v) => Some(v.iter().cloned().map(ClassLabel::Text).collect::<Vec<_>>()),
        TensorData::LongInts(v) => Some(v.iter().copied().map(ClassLabel::Number).collect()),
        TensorData::Ints(v) => Some(v.iter().map(|&n| ClassLabel::Number(n.into())).collect()),
        _ => None,
    };
    match &value.data {
        ValueData::Immediate(Immediate::Tensor(data)) => of_data(data),
        ValueData::Immediate(Immediate::List(values)) => {
            let each = values.iter().map(|v| of_data(v.tensor_data()?));
            Some(each.collect::<Option<Vec<_>>>()?.concat())
        }
        _ => None,
    }
}
