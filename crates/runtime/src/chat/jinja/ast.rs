//! A template as a tree.

use super::meter::Text;
use std::sync::Arc;

/// A name of a variable, attribute, filter or test.
pub type Name = Arc<Text>;

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
pub enum Comparison {
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
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Name),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Arguments),
    Filter(Box<Expr>, Name, Arguments),
    Test(Box<Expr>, Name, Arguments),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    /// Condition, value, other value.
    Either(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub struct Arguments {
    pub positional: Vec<Expr>,
    pub named: Vec<(Name, Expr)>,
    /// `*list` and `**map`.
    pub list: Option<Box<Expr>>,
    pub map: Option<Box<Expr>>,
}

/// What is assigned to.
#[derive(Debug)]
pub enum Target {
    Name(Name),
    /// Attribute of a namespace.
    Attribute(Name, Name),
    Tuple(Vec<Target>),
}

/// A statement.
#[derive(Debug)]
pub enum Statement {
    Text(Box<str>),
    Print(Expr),
    Set(Target, Expr),
    /// Sets the text of a body, through a filter of [`BODY`].
    SetBlock(Target, Option<Expr>, Vec<Line>),
    If(Vec<(Expr, Vec<Line>)>, Vec<Line>),
    For(Arc<Loop>),
    Macro(Arc<MacroBody>),
    Call(Expr, Arc<MacroBody>),
    FilterBlock(Expr, Vec<Line>),
    With(Vec<(Target, Expr)>, Vec<Line>),
    /// A body with variables of its own: `generation`, `block`.
    Scope(Vec<Line>),
    Break,
    Continue,
    /// A statement that has no meaning here, such as `include`.
    Refused(String),
}

/// Name of the variable that holds the text of a body for its filter.
pub const BODY: &str = "";

/// A statement with its line.
#[derive(Debug)]
pub struct Line {
    pub line: usize,
    pub statement: Statement,
}

/// A `for` loop.
#[derive(Debug)]
pub struct Loop {
    pub target: Target,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub recursive: bool,
    pub body: Vec<Line>,
    pub otherwise: Vec<Line>,
}

/// A macro, or the body of a `call`.
#[derive(Debug)]
pub struct MacroBody {
    pub name: Name,
    /// Parameters, with their defaults.
    pub parameters: Vec<(Name, Option<Expr>)>,
    pub body: Vec<Line>,
    /// True if the body names `varargs`, `kwargs`, `caller`.
    pub reads: [bool; 3],
}
