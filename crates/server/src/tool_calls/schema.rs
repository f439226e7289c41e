//! The part of a JSON schema that decides how a written value is read: its types, properties and items.

use serde_json::Value;

/// Most alternatives of a schema (`anyOf`, `$ref` and their like) that are looked at.
const MOST_BRANCHES: usize = 64;

/// Set of JSON types.
pub type Types = u8;
pub const NULL: Types = 1;
pub const BOOLEAN: Types = 2;
pub const INTEGER: Types = 4;
/// Numbers that are not whole.
pub const FRACTION: Types = 8;
pub const TEXT: Types = 16;
pub const LIST: Types = 32;
pub const OBJECT: Types = 64;
const ALL: Types = 127;
/// First character of a text that stands for a whole number too long for a [`Value`].
pub const LONG: char = '\0';

/// A schema with its alternatives side by side. Without a schema, any value fits.
#[derive(Clone)]
pub struct ArgumentShape<'s> {
    root: &'s Value,
    branches: Vec<&'s Value>,
}

impl<'s> ArgumentShape<'s> {
    /// Makes the shape of `schema`, whose references begin at `root`.
    pub fn new(root: &'s Value, schema: &'s Value) -> ArgumentShape<'s> {
        ArgumentShape { root, branches: branches(root, schema, &["anyOf", "oneOf", "allOf"]) }
    }

    /// Returns the types that the schema allows.
    pub fn types(&self) -> Types {
        let mut types = 0;
        for schema in &self.branches {
            match &schema["type"] {
                Value::String(name) => types |= named(name),
                Value::Array(names) => {
                    types |= names.iter().filter_map(Value::as_str).fold(0, |all, name| all | named(name));
                }
                _ => {
                    let values = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
                    types |= values.fold(0, |all, value| all | type_of(value));
                    types |= if schema["properties"].is_object() { OBJECT } else { 0 };
                }
            }
            types |= if types != 0 && schema["nullable"] == true { NULL } else { 0 };
        }
        if types == 0 { ALL } else { types }
    }

    fn properties(&self) -> impl Iterator<Item = &'s serde_json::Map<String, Value>> {
        self.branches.iter().filter_map(|schema| schema["properties"].as_object())
    }

    /// Tells whether the schema has a property of this name.
    pub fn has(&self, key: &str) -> bool {
        self.properties().any(|all| all.contains_key(key))
    }

    /// Tells whether the schema requires a property of this name.
    pub fn requires(&self, key: &str) -> bool {
        let lists = self.branches.iter().filter_map(|schema| schema["required"].as_array());
        lists.flatten().any(|name| name == key)
    }

    /// Tells whether the schema names properties.
    pub fn has_properties(&self) -> bool {
        self.properties().any(|all| !all.is_empty())
    }

    /// Returns the shape of a property.
    pub fn property(&self, key: &str) -> ArgumentShape<'s> {
        let named = self.properties().find_map(|all| all.get(key));
        let other = || self.branches.iter().find_map(|schema| schema.get("additionalProperties"));
        ArgumentShape::new(self.root, named.or_else(other).unwrap_or(&Value::Null))
    }

    /// Returns the shape of an item of a list.
    pub fn item(&self, i: usize) -> ArgumentShape<'s> {
        let first = |schema: &'s Value| {
            ["prefixItems", "items"].iter().find_map(|key| schema[*key].as_array()?.get(i))
        };
        let others = |schema: &'s Value| schema.get("items").filter(|items| !items.is_array());
        let own = self.branches.iter().find_map(|schema| first(schema));
        let item = own.or_else(|| self.branches.iter().find_map(|schema| others(schema)));
        ArgumentShape::new(self.root, item.unwrap_or(&Value::Null))
    }
}

/// Returns the schema to which a schema refers.
pub fn target<'s>(root: &'s Value, schema: &Value) -> Option<&'s Value> {
    root.pointer(schema["$ref"].as_str()?.strip_prefix('#')?)
}

/// Returns a schema, those to which it refers, and those in its lists under `keys`.
pub fn branches<'s>(root: &'s Value, schema: &'s Value, keys: &[&str]) -> Vec<&'s Value> {
    let mut open = vec![schema];
    let mut branches: Vec<&Value> = Vec::new();
    while let Some(schema) = open.pop() {
        if branches.len() == MOST_BRANCHES || branches.iter().any(|known| std::ptr::eq(*known, schema)) {
            continue;
        }
        branches.push(schema);
        let inner = keys.iter().filter_map(|key| schema[*key].as_array());
        open.extend(inner.flatten().rev().chain(target(root, schema)));
    }
    branches
}

fn named(name: &str) -> Types {
    // Google's schemas have names in capitals.
    match name.to_ascii_lowercase().as_str() {
        "null" => NULL,
        "boolean" => BOOLEAN,
        "integer" => INTEGER,
        "number" => INTEGER | FRACTION,
        "string" => TEXT,
        "array" => LIST,
        "object" => OBJECT,
        _ => 0,
    }
}

/// Returns the type of a value.
pub fn type_of(value: &Value) -> Types {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(n) if n.is_f64() => FRACTION,
        Value::Number(_) => INTEGER,
        Value::String(text) if text.starts_with(LONG) => INTEGER,
        Value::String(_) => TEXT,
        Value::Array(_) => LIST,
        Value::Object(_) => OBJECT,
    }
}
