//! Names of values.

/// Words of MIL's text form, which cannot be names.
const RESERVED: [&str; 29] = [
    "any", "bf16", "bool", "dict", "false", "fp16", "fp32", "fp64", "func", "int1", "int16", "int32", "int4",
    "int64", "int8", "list", "program", "state", "string", "tensor", "true", "tuple", "uint1", "uint16",
    "uint32", "uint4", "uint64", "uint8", "fp8",
];

/// Checks a name: it matches `[A-Za-z_][A-Za-z0-9_@]*` and is not a reserved word of MIL.
pub(crate) fn check(name: &str) -> Result<(), String> {
    let mut chars = name.chars();
    let first = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !first || !chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '@') {
        return Err(format!(
            "`{name}` is not a name: letters, digits, `_` and `@`, not starting with a digit"
        ));
    }
    if RESERVED.contains(&name) {
        return Err(format!("`{name}` is a reserved word"));
    }
    Ok(())
}
