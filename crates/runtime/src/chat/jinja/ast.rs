//! A template as a tree.

use super::meter::Text;
use std::sync::Arc;

/// A name of a variable, attribute, filter or test.
pub type Identifier = Arc<Text>;

/// A constant.
#[derive(Clone, Debug)]
pub enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<Text>),
}

/// An operator between two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

/// An expression.
#[derive(Debug)]
pub enum Expr {
    Literal(Literal),
    Identifier(Identifier),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Identifier),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Arguments),
    Filter(Box<Expr>, Identifier, Arguments),
    Test(Box<Expr>, Identifier, Arguments),
    Not(Box<Expr>),
    /// True for a minus.
    Sign(bool, Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    /// Condition, value, other value.
    Either(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(CompareOp, Expr)>),
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub struct Arguments {
    pub positional: Vec<Expr>,
    pub named: Vec<(Identifier, Expr)>,
    /// `*list` and `**map`.
    pub list: Option<Box<Expr>>,
    pub map: Option<Box<Expr>>,
}

/// Target of an assignment.
#[derive(Debug)]
pub enum AssignTarget {
    Identifier(Identifier),
    /// Attribute of a namespace.
    Attribute(Identifier, Identifier),
    Tuple(Vec<AssignTarget>),
}

/// A statement.
#[derive(Debug)]
pub enum Statement {
    Text(Box<str>),
    Print(Expr),
    Set(AssignTarget, Expr),
    /// Sets the text of a body, through a filter of [`BODY`].
    SetBlock(AssignTarget, Option<Expr>, Vec<TemplateLine>),
    If(Vec<(Expr, Vec<TemplateLine>)>, Vec<TemplateLine>),
    For(Arc<Loop>),
    Macro(Arc<MacroBody>),
    Call(Expr, Arc<MacroBody>),
    FilterBlock(Expr, Vec<TemplateLine>),
    With(Vec<(AssignTarget, Expr)>, Vec<TemplateLine>),
    /// A body with variables of its own: `generation`, `block`.
    TemplateScope(Vec<TemplateLine>),
    Break,
    Continue,
    /// A statement that has no meaning here, such as `include`.
    Refused(String),
}

/// Name of the variable that holds the text of a body for its filter.
pub const BODY: &str = "";

/// A statement with its line.
#[derive(Debug)]
pub struct TemplateLine {
    pub line: usize,
    pub statement: Statement,
}

/// A `for` loop.
#[derive(Debug)]
pub struct Loop {
    pub target: AssignTarget,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub recursive: bool,
    pub body: Vec<TemplateLine>,
    pub otherwise: Vec<TemplateLine>,
}

/// A macro, or the body of a `call`.
#[derive(Debug)]
pub struct MacroBody {
    pub name: Identifier,
    /// Parameters, with their defaults.
    pub parameters: Vec<(Identifier, Option<Expr>)>,
    pub body: Vec<TemplateLine>,
    /// True if the body names `varargs`, `kwargs`, `caller`.
    pub reads: [bool; 3],
}
