//! Values as Python has them: equality, order, truth, iteration and keys.

use super::ast::{Identifier, Literal, Loop, MacroBody};
use super::meter::{Fallible, Text, copied, fail, hold, release, spend};
use serde_json::Value as Json;
use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// Deepest nesting of lists and maps; JSON of a request is at most 128 deep.
const MOST_NESTED: u32 = 300;

/// A value of a template.
#[derive(Clone)]
pub enum PyValue {
    /// Nothing, with the message of the error that its use gives.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<Text>),
    /// Text that was escaped for HTML.
    Markup(Arc<Text>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Dict>),
    DictView(DictView, Rc<Dict>),
    Range(Range),
    Iterator(Rc<Stream>),
    Namespace(Rc<RefCell<Dict>>),
    Cycler(Rc<Turns>),
    Joiner(Rc<Turns>),
    Loop(Rc<LoopState>),
    Macro(Rc<Macro>),
    Method(Rc<(PyValue, Identifier)>),
    /// A function by its name.
    Function(&'static str),
}

/// A view of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DictView {
    Keys,
    PyValues,
    Items,
}

/// Whole numbers from `start` on, `length` of them, before `stop`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub start: i128,
    pub stop: i128,
    pub step: i128,
    pub length: i128,
}

/// Elements of a list or tuple.
pub struct Items {
    values: Vec<PyValue>,
    depth: u32,
    /// True for a tuple of `groupby`, which has names for its two elements.
    pub is_group: bool,
}

/// A map in the order of its insertions.
#[derive(Default)]
pub struct Dict {
    entries: Vec<(PyValue, PyValue)>,
    index: HashMap<Key, usize>,
    depth: u32,
}

/// Values that can be iterated once.
pub struct Stream {
    pub values: RefCell<VecDeque<PyValue>>,
    depth: u32,
}

/// Values that are given in turn: all of a cycler, nothing and then the separator of a joiner.
pub struct Turns {
    pub values: Vec<PyValue>,
    pub at: Cell<usize>,
    depth: u32,
}

/// Variables of a part of a template, and those around it.
pub struct TemplateScope {
    pub variables: RefCell<Vec<(Identifier, PyValue)>>,
    pub outer: Option<Rc<TemplateScope>>,
}

/// A macro with the variables around it.
pub struct Macro {
    pub body: Arc<MacroBody>,
    pub scope: Rc<TemplateScope>,
}

/// A running loop.
pub struct LoopState {
    pub of: Arc<Loop>,
    pub scope: Rc<TemplateScope>,
    pub rest: RefCell<PyValues>,
    pub length: Cell<Option<usize>>,
    /// Number of the current element, from 1.
    pub index: Cell<usize>,
    pub depth: usize,
    pub before: RefCell<Option<PyValue>>,
    pub current: RefCell<Option<PyValue>>,
    pub after: RefCell<Option<PyValue>>,
    pub changed: RefCell<Option<PyValue>>,
    /// Nesting of the values that the loop holds.
    pub nesting: Cell<u32>,
}

/// Values of an iteration.
pub enum PyValues {
    Once(Rc<Stream>),
    Shared(Rc<Items>, usize),
    Own(std::vec::IntoIter<PyValue>),
}

impl Iterator for PyValues {
    type Item = PyValue;
    fn next(&mut self) -> Option<PyValue> {
        match self {
            PyValues::Once(stream) => stream.values.borrow_mut().pop_front(),
            PyValues::Shared(items, at) => {
                *at += 1;
                items.get(*at - 1).cloned()
            }
            PyValues::Own(values) => values.next(),
        }
    }
}

/// A key of a map: equal numbers are one key.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    None,
    Int(i128),
    Float(u64),
    Str(Box<str>),
    Tuple(Vec<Key>),
    Other(usize),
}

const VALUE_BYTES: usize = size_of::<PyValue>();
/// Bytes of an entry of a map, and of its place in the index.
const ENTRY_BYTES: usize = 6 * VALUE_BYTES;

/// Returns how deep a value is nested.
pub fn depth_of(value: &PyValue) -> Fallible<u32> {
    let depth = match value {
        PyValue::List(items) | PyValue::Tuple(items) => items.depth,
        PyValue::Dict(dict) | PyValue::DictView(_, dict) => dict.depth,
        PyValue::Method(method) => depth_of(&method.0)?,
        PyValue::Cycler(turns) | PyValue::Joiner(turns) => turns.depth,
        PyValue::Iterator(stream) => stream.depth,
        PyValue::Loop(state) => state.nesting.get(),
        _ => 0,
    };
    match depth {
        n if n >= MOST_NESTED => fail(format!("a value nested more than {MOST_NESTED} deep")),
        n => Ok(n),
    }
}

/// Returns the depth of a value that holds these.
fn depth_around(values: &[PyValue]) -> Fallible<u32> {
    values.iter().try_fold(1, |depth, value| Ok(depth_of(value)?.max(depth - 1) + 1))
}

impl Items {
    fn new(values: Vec<PyValue>, is_group: bool) -> Fallible<Rc<Items>> {
        let depth = depth_around(&values)?;
        spend(1 + values.len() as u64 / 8)?;
        hold((values.len() + 2) * VALUE_BYTES);
        Ok(Rc::new(Items { values, depth, is_group }))
    }
}

impl std::ops::Deref for Items {
    type Target = [PyValue];
    fn deref(&self) -> &[PyValue] {
        &self.values
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        release((self.values.len() + 2) * VALUE_BYTES);
    }
}

impl Dict {
    /// Returns the entries.
    pub fn entries(&self) -> &[(PyValue, PyValue)] {
        &self.entries
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &PyValue) -> Fallible<Option<&PyValue>> {
        Ok(self.index.get(&key_of(key)?).map(|i| &self.entries[*i].1))
    }

    /// Returns the value of a name.
    pub fn named(&self, name: &str) -> Option<&PyValue> {
        self.index.get(&Key::Str(name.into())).map(|i| &self.entries[*i].1)
    }

    /// Sets the value of a key.
    pub fn set(&mut self, key: PyValue, value: PyValue) -> Fallible<()> {
        self.depth = self.depth.max(depth_of(&value)?.max(depth_of(&key)?) + 1);
        match self.index.entry(key_of(&key)?) {
            Entry::Occupied(place) => self.entries[*place.get()].1 = value,
            Entry::Vacant(place) => {
                place.insert(self.entries.len());
                self.entries.push((key, value));
                hold(ENTRY_BYTES);
            }
        }
        Ok(())
    }
}

impl Drop for Dict {
    fn drop(&mut self) {
        release(ENTRY_BYTES * self.entries.len());
    }
}

impl Turns {
    /// Makes the turns of some values.
    pub fn new(values: Vec<PyValue>) -> Fallible<Rc<Turns>> {
        let depth = depth_around(&values)?;
        Ok(Rc::new(Turns { values, at: Cell::new(0), depth }))
    }
}

impl Range {
    /// Returns the element at an index from 0.
    pub fn at(self, i: i128) -> PyValue {
        PyValue::Int(self.start + self.step * i)
    }
}

/// Returns the key that equal values share.
fn key_of(value: &PyValue) -> Fallible<Key> {
    spend(1)?;
    Ok(match value {
        PyValue::None => Key::None,
        PyValue::Bool(b) => Key::Int(i128::from(*b)),
        PyValue::Int(n) => Key::Int(*n),
        PyValue::Float(x) if x.fract() == 0.0 && x.abs() < 1e37 => Key::Int(*x as i128),
        PyValue::Float(x) => Key::Float(x.to_bits()),
        PyValue::Str(text) | PyValue::Markup(text) => {
            copied(text.len());
            Key::Str((***text).into())
        }
        PyValue::Tuple(items) => {
            spend(16 * items.len() as u64)?;
            Key::Tuple(items.iter().map(key_of).collect::<Fallible<_>>()?)
        }
        PyValue::Undefined(_) => Key::Other(0),
        PyValue::Range(range) => {
            Key::Tuple(vec![Key::Int(range.start), Key::Int(range.step), Key::Int(range.length)])
        }
        PyValue::List(_) | PyValue::Dict(_) | PyValue::DictView(..) => {
            return fail(format!("unhashable type: '{}'", value.type_name()));
        }
        other => Key::Other(other.address()),
    })
}

/// Makes an undefined value.
pub fn undefined(message: impl Into<Rc<str>>) -> PyValue {
    PyValue::Undefined(message.into())
}

impl PyValue {
    /// Makes a text.
    pub fn text(text: impl Into<Box<str>>) -> PyValue {
        PyValue::Str(Text::new(text))
    }

    /// Makes a list.
    pub fn list(values: Vec<PyValue>) -> Fallible<PyValue> {
        Ok(PyValue::List(Items::new(values, false)?))
    }

    /// Makes a tuple.
    pub fn tuple(values: Vec<PyValue>) -> Fallible<PyValue> {
        Ok(PyValue::Tuple(Items::new(values, false)?))
    }

    /// Makes a group: the value that its elements share, and the list of them.
    pub fn group(values: Vec<PyValue>) -> Fallible<PyValue> {
        Ok(PyValue::Tuple(Items::new(values, true)?))
    }

    /// Makes a map.
    pub fn dict(entries: impl IntoIterator<Item = (PyValue, PyValue)>) -> Fallible<PyValue> {
        let mut dict = Dict::default();
        for (key, value) in entries {
            dict.set(key, value)?;
        }
        Ok(PyValue::Dict(Rc::new(dict)))
    }

    /// Makes what a generator of Python gives.
    pub fn stream(values: Vec<PyValue>) -> Fallible<PyValue> {
        let depth = depth_around(&values)?;
        Ok(PyValue::Iterator(Rc::new(Stream { values: RefCell::new(values.into()), depth })))
    }

    /// Makes a value of a constant.
    pub fn literal(literal: &Literal) -> PyValue {
        match literal {
            Literal::None => PyValue::None,
            Literal::Bool(b) => PyValue::Bool(*b),
            Literal::Int(n) => PyValue::Int(*n),
            Literal::Float(x) => PyValue::Float(*x),
            Literal::Text(text) => PyValue::Str(text.clone()),
        }
    }

    /// Makes a value of JSON.
    pub fn from_json(json: &Json) -> Fallible<PyValue> {
        spend(1)?;
        Ok(match json {
            Json::Null => PyValue::None,
            Json::Bool(b) => PyValue::Bool(*b),
            Json::Number(n) => match n.as_i128() {
                Some(n) => PyValue::Int(n),
                None => PyValue::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => PyValue::text(text.as_str()),
            Json::Array(values) => {
                PyValue::list(values.iter().map(PyValue::from_json).collect::<Fallible<_>>()?)?
            }
            Json::Object(map) => {
                let mut dict = Dict::default();
                for (key, value) in map {
                    dict.set(PyValue::text(key.as_str()), PyValue::from_json(value)?)?;
                }
                PyValue::Dict(Rc::new(dict))
            }
        })
    }

    /// Returns the text of a text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            PyValue::Str(text) | PyValue::Markup(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the number of a whole number or a truth value.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            PyValue::Bool(b) => Some(i128::from(*b)),
            PyValue::Int(n) => Some(*n),
            _ => None,
        }
    }

    /// Returns the number of any number.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            PyValue::Float(x) => Some(*x),
            other => other.as_int().map(|n| n as f64),
        }
    }

    /// Tells whether a value is undefined.
    pub fn is_undefined(&self) -> bool {
        matches!(self, PyValue::Undefined(_))
    }

    /// Refuses an undefined value with its message.
    pub fn defined(&self) -> Fallible<&PyValue> {
        match self {
            PyValue::Undefined(message) => fail(&**message),
            _ => Ok(self),
        }
    }

    /// Returns Python's name of the type.
    pub fn type_name(&self) -> &'static str {
        match self {
            PyValue::Undefined(_) => "Undefined",
            PyValue::None => "NoneType",
            PyValue::Bool(_) => "bool",
            PyValue::Int(_) => "int",
            PyValue::Float(_) => "float",
            PyValue::Str(_) => "str",
            PyValue::Markup(_) => "Markup",
            PyValue::List(_) => "list",
            PyValue::Tuple(_) => "tuple",
            PyValue::Dict(_) => "dict",
            PyValue::DictView(DictView::Keys, _) => "dict_keys",
            PyValue::DictView(DictView::PyValues, _) => "dict_values",
            PyValue::DictView(DictView::Items, _) => "dict_items",
            PyValue::Range(_) => "range",
            PyValue::Iterator(_) => "generator",
            PyValue::Namespace(_) => "Namespace",
            PyValue::Cycler(_) => "Cycler",
            PyValue::Joiner(_) => "Joiner",
            PyValue::Loop(_) => "LoopContext",
            PyValue::Macro(_) => "Macro",
            PyValue::Method(_) => "method",
            PyValue::Function(_) => "function",
        }
    }

    fn address(&self) -> usize {
        match self {
            PyValue::List(items) | PyValue::Tuple(items) => Rc::as_ptr(items).addr(),
            PyValue::Dict(dict) => Rc::as_ptr(dict).addr(),
            PyValue::Iterator(stream) => Rc::as_ptr(stream).addr(),
            PyValue::Namespace(namespace) => Rc::as_ptr(namespace).addr(),
            PyValue::Cycler(turns) | PyValue::Joiner(turns) => Rc::as_ptr(turns).addr(),
            PyValue::Loop(state) => Rc::as_ptr(state).addr(),
            PyValue::Macro(it) => Rc::as_ptr(it).addr(),
            PyValue::Method(method) => Rc::as_ptr(method).addr(),
            PyValue::Function(name) => name.as_ptr().addr(),
            _ => 0,
        }
    }

    /// Tells whether two values are the same object.
    pub fn is_same(&self, other: &PyValue) -> bool {
        let address = self.address();
        if address != 0 || other.address() != 0 {
            return address == other.address();
        }
        self.type_name() == other.type_name() && equal(self, other).unwrap_or(false)
    }

    /// Tells whether Python counts the value as true.
    pub fn is_true(&self) -> bool {
        match self {
            PyValue::Undefined(_) | PyValue::None => false,
            PyValue::Bool(b) => *b,
            PyValue::Int(n) => *n != 0,
            PyValue::Float(x) => *x != 0.0,
            PyValue::Str(text) | PyValue::Markup(text) => !text.is_empty(),
            other => other.length().is_none_or(|n| n > 0),
        }
    }

    /// Returns the length of what has one.
    pub fn length(&self) -> Option<usize> {
        Some(match self {
            PyValue::Undefined(_) => 0,
            PyValue::Str(text) | PyValue::Markup(text) => {
                copied(text.len() * 4);
                char_count(text)
            }
            PyValue::List(items) | PyValue::Tuple(items) => items.len(),
            PyValue::Dict(dict) | PyValue::DictView(_, dict) => dict.entries.len(),
            PyValue::Range(range) => range.length as usize,
            _ => return None,
        })
    }

    /// Returns the values that a loop over this value meets.
    pub fn values(&self) -> Fallible<PyValues> {
        let values: Vec<PyValue> = match self {
            PyValue::Undefined(_) => Vec::new(),
            PyValue::Str(text) | PyValue::Markup(text) => {
                spend(text.len() as u64)?;
                super::meter::reserve(text.len().saturating_mul(VALUE_BYTES + 48))?;
                text.chars().map(|c| PyValue::text(String::from(c))).collect()
            }
            PyValue::List(items) | PyValue::Tuple(items) => return Ok(PyValues::Shared(items.clone(), 0)),
            PyValue::Dict(dict) | PyValue::DictView(DictView::Keys, dict) => {
                dict.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            PyValue::DictView(DictView::PyValues, dict) => {
                dict.entries.iter().map(|(_, value)| value.clone()).collect()
            }
            PyValue::DictView(DictView::Items, dict) => {
                let pairs =
                    dict.entries.iter().map(|(key, value)| PyValue::tuple(vec![key.clone(), value.clone()]));
                pairs.collect::<Fallible<_>>()?
            }
            PyValue::Range(range) => (0..range.length).map(|i| range.at(i)).collect(),
            PyValue::Iterator(stream) => return Ok(PyValues::Once(stream.clone())),
            other => return fail(format!("'{}' object is not iterable", other.type_name())),
        };
        spend(values.len() as u64 / 4)?;
        Ok(PyValues::Own(values.into_iter()))
    }

    /// Returns the values that a loop over this value meets as a list.
    pub fn to_vec(&self) -> Fallible<Vec<PyValue>> {
        let values = self.values()?;
        spend(self.length().unwrap_or(0) as u64 / 4)?;
        Ok(values.collect())
    }
}

/// Returns the number of characters of a text.
pub fn char_count(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { text.chars().count() }
}

/// Tells whether two values are equal.
pub fn equal(a: &PyValue, b: &PyValue) -> Fallible<bool> {
    spend(1)?;
    let all = |a: &[PyValue], b: &[PyValue]| -> Fallible<bool> {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (a, b) in a.iter().zip(b) {
            if !equal(a, b)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    Ok(match (a, b) {
        (PyValue::Undefined(_), PyValue::Undefined(_)) | (PyValue::None, PyValue::None) => true,
        (PyValue::List(a), PyValue::List(b)) | (PyValue::Tuple(a), PyValue::Tuple(b)) => {
            Rc::ptr_eq(a, b) || all(a, b)?
        }
        (PyValue::Dict(a), PyValue::Dict(b)) => {
            if Rc::ptr_eq(a, b) {
                return Ok(true);
            }
            if a.entries.len() != b.entries.len() {
                return Ok(false);
            }
            for (key, value) in &a.entries {
                match b.get(key)? {
                    Some(other) if equal(value, other)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (PyValue::DictView(DictView::Keys, a), PyValue::DictView(DictView::Keys, b)) => {
            let mut known = a.entries.len() == b.entries.len();
            for (key, _) in &a.entries {
                known = known && b.get(key)?.is_some();
            }
            known
        }
        (PyValue::Range(a), PyValue::Range(b)) => {
            a.length == b.length
                && (a.length == 0 || a.start == b.start && (a.length == 1 || a.step == b.step))
        }
        _ => match (a.as_str(), b.as_str()) {
            (Some(a), Some(b)) => {
                copied(a.len().min(b.len()));
                a == b
            }
            (None, None) => match numbers(a, b) {
                Some(order) => order == Some(Ordering::Equal),
                None => a.address() != 0 && a.address() == b.address(),
            },
            _ => false,
        },
    })
}

/// Compares two numbers; the inner result is none where one is not a number.
fn numbers(a: &PyValue, b: &PyValue) -> Option<Option<Ordering>> {
    if let (Some(a), Some(b)) = (a.as_int(), b.as_int()) {
        return Some(Some(a.cmp(&b)));
    }
    let (x, y) = (a.as_float()?, b.as_float()?);
    // Whole numbers beyond 53 bits do not fit a float.
    let exact = |n: i128, x: f64| match x {
        x if x.is_nan() => None,
        x if x >= 1e38 => Some(Ordering::Less),
        x if x <= -1e38 => Some(Ordering::Greater),
        x => Some(n.cmp(&(x.floor() as i128)).then(if x.fract() == 0.0 {
            Ordering::Equal
        } else {
            Ordering::Less
        })),
    };
    Some(match (a.as_int(), b.as_int()) {
        (Some(n), _) => exact(n, y),
        (_, Some(n)) => exact(n, x).map(Ordering::reverse),
        _ => x.partial_cmp(&y),
    })
}

/// Compares two values; none where one is not a number.
pub fn compare(a: &PyValue, b: &PyValue, operator: &str) -> Fallible<Option<Ordering>> {
    spend(1)?;
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        copied(a.len().min(b.len()));
        return Ok(Some(a.cmp(b)));
    }
    if let Some(order) = numbers(a, b) {
        return Ok(order);
    }
    match (a, b) {
        (PyValue::List(a), PyValue::List(b)) | (PyValue::Tuple(a), PyValue::Tuple(b)) => {
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(a, b)? {
                    return compare(a, b, operator);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => {
            a.defined()?;
            b.defined()?;
            let (a, b) = (a.type_name(), b.type_name());
            fail(format!("'{operator}' not supported between instances of '{a}' and '{b}'"))
        }
    }
}

/// Sorts values by keys; equal ones keep their order.
pub fn sort(mut pairs: Vec<(PyValue, PyValue)>, reverse: bool) -> Fallible<Vec<PyValue>> {
    let mut width = 1;
    while width < pairs.len() {
        let mut merged = Vec::with_capacity(pairs.len());
        let mut rest = pairs.into_iter().peekable();
        while rest.peek().is_some() {
            let left: Vec<_> = rest.by_ref().take(width).collect();
            let right: Vec<_> = rest.by_ref().take(width).collect();
            let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
            while let (Some(l), Some(r)) = (left.peek(), right.peek()) {
                let (first, second) = if reverse { (&l.0, &r.0) } else { (&r.0, &l.0) };
                let takes_right = compare(first, second, "<")? == Some(Ordering::Less);
                merged.extend(if takes_right { right.next() } else { left.next() });
            }
            merged.extend(left);
            merged.extend(right);
        }
        pairs = merged;
        width *= 2;
    }
    Ok(pairs.into_iter().map(|(_, value)| value).collect())
}

/// Tells whether a value holds another.
pub fn contains(whole: &PyValue, part: &PyValue) -> Fallible<bool> {
    match whole {
        PyValue::Str(text) | PyValue::Markup(text) => match part.as_str() {
            Some(part) => {
                spend(text.len() as u64 / 64)?;
                Ok(text.contains(part))
            }
            None => fail(format!("'in <string>' requires string as left operand, not {}", part.type_name())),
        },
        PyValue::Dict(dict) | PyValue::DictView(DictView::Keys, dict) => Ok(dict.get(part)?.is_some()),
        PyValue::None | PyValue::Bool(_) | PyValue::Int(_) | PyValue::Float(_) => {
            fail(format!("argument of type '{}' is not iterable", whole.type_name()))
        }
        _ => {
            for value in whole.values()? {
                if equal(&value, part)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}
