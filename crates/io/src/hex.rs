//! Bytes as text.

/// Returns bytes in hexadecimal, two lower-case digits each.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::hex;

    #[test]
    fn every_byte_has_two_digits() {
        assert_eq!(hex([0, 9, 0xab, 0xff]), "0009abff");
        assert_eq!(hex([]), "");
    }
}
