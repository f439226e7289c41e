//! Names from other machines that may become paths here.

/// Most bytes of a part of a path.
pub const MAX_PART: usize = 200;

/// Tells whether a relative path stays below its folder and has only characters that every system allows in names.
pub fn is_safe_name(path: &str) -> bool {
    let part = |part: &str| {
        let known = |b: u8| b.is_ascii_alphanumeric() || b"._-+ ()=,".contains(&b);
        !part.is_empty()
            && part.len() <= MAX_PART
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', ' '])
            && part.bytes().all(known)
    };
    path.len() <= 5 * MAX_PART && path.split('/').all(part)
}
