//! MIL's operations: one row per op type with its parameters, its first opset and its type inference.
//!
//! Names, defaults and rules are those of coremltools' op definitions (iOS15 to iOS18).

mod context;
mod infer;
mod infer_image;
mod infer_index;
mod infer_sequence;
mod infer_shape;
mod table;

pub use context::{Context, Inferred, Operand};

use crate::mil::Opset;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// One op type.
pub struct OpDef {
    /// Name, for instance `conv`.
    pub name: &'static str,
    /// The first opset that has it.
    pub opset: Opset,
    /// Parameters in the order of the definition.
    pub params: Vec<Param>,
    infer: fn(&Context<'_>) -> Inferred,
}

/// One parameter of an op type.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name, for instance `pad_type`.
    pub name: &'static str,
    /// Presence: required, optional, or with a default.
    pub presence: Presence,
    /// True if it takes any number of values, as `values` of `concat`.
    pub variadic: bool,
}

/// Presence of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Presence {
    /// The parameter must be bound.
    Required,
    /// The parameter may be left out; it has no default that could be written.
    Optional,
    /// The parameter may be left out; this is its value then.
    Default(Default),
}

/// Default of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Default {
    /// bool
    Bool(bool),
    /// int32
    Int(i32),
    /// A number, stored in the element type of the first operand.
    Number(f32),
    /// string
    Text(&'static str),
}

impl OpDef {
    /// Returns the parameter named `name`.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|p| p.name == name)
    }

    /// Infers the types of the results.
    ///
    /// # Errors
    /// A required operand is missing, or the operands' types do not fit the op.
    pub fn infer(&self, context: &Context<'_>) -> Inferred {
        for p in &self.params {
            if p.presence == Presence::Required && !context.has(p.name) {
                return Err(format!("required parameter `{}` is missing", p.name));
            }
        }
        (self.infer)(context)
    }

    /// Reads a row of the table: `x weight bias? groups=1 pad_type='valid' values*`.
    fn parse(
        name: &'static str,
        opset: Opset,
        params: &'static str,
        infer: fn(&Context<'_>) -> Inferred,
    ) -> OpDef {
        let param = |text: &'static str| {
            if let Some((name, value)) = text.split_once('=') {
                let default = match value {
                    "true" => Default::Bool(true),
                    "false" => Default::Bool(false),
                    v if v.starts_with('\'') => Default::Text(v.trim_matches('\'')),
                    v if v.contains(['.', 'e']) => {
                        Default::Number(v.parse().expect("a number in the op table"))
                    }
                    v => Default::Int(v.parse().expect("an integer in the op table")),
                };
                return Param { name, presence: Presence::Default(default), variadic: false };
            }
            if let Some(name) = text.strip_suffix('?') {
                return Param { name, presence: Presence::Optional, variadic: false };
            }
            match text.strip_suffix('*') {
                Some(name) => Param { name, presence: Presence::Required, variadic: true },
                None => Param { name: text, presence: Presence::Required, variadic: false },
            }
        };
        OpDef { name, opset, params: params.split_whitespace().map(param).collect(), infer }
    }
}

static OPS: LazyLock<BTreeMap<&'static str, OpDef>> = LazyLock::new(|| {
    let rows = table::ROWS.iter();
    rows.map(|&(name, opset, params, infer)| (name, OpDef::parse(name, opset, params, infer))).collect()
});

/// Returns the definition of the op type `name`.
pub fn op(name: &str) -> Option<&'static OpDef> {
    OPS.get(name)
}

/// Returns the definitions of all op types, sorted by name.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    OPS.values()
}
