//! Page sizes as mpss.so.1 reads them: an integer with an optional base prefix (`0x`, `0`) and an optional
//! unit. The unit is B, K, M, G or T in either case. A size is a power of two, or 0: the system's choice.

/// A page size in bytes, or 0.
pub type PageBytes = u64;

/// Parses a size. Returns none if the text is not one.
pub fn parse(text: &[u8]) -> Option<PageBytes> {
    let (digits, shift) = match text.split_last()? {
        (b'b' | b'B', rest) if !is_hex(text) => (rest, 0),
        (b'k' | b'K', rest) => (rest, 10),
        (b'm' | b'M', rest) => (rest, 20),
        (b'g' | b'G', rest) => (rest, 30),
        (b't' | b'T', rest) => (rest, 40),
        _ => (text, 0),
    };
    let (digits, base) = match digits {
        [b'0', b'x' | b'X', rest @ ..] => (rest, 16),
        [b'0', rest @ ..] if !rest.is_empty() => (rest, 8),
        _ => (digits, 10),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value: u64 = 0;
    for digit in digits {
        let digit = (*digit as char).to_digit(base)?;
        value = value.checked_mul(u64::from(base))?.checked_add(u64::from(digit))?;
    }
    let bytes = value.checked_mul(1 << shift)?;
    (bytes == 0 || bytes.is_power_of_two()).then_some(bytes)
}

/// Returns true for a hexadecimal number, in which a trailing `b` is a digit.
fn is_hex(text: &[u8]) -> bool {
    matches!(text, [b'0', b'x' | b'X', ..])
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn sizes_as_the_original_reads_them() {
        let good: [(&str, u64); 9] = [
            ("4M", 4 << 20),
            ("64k", 64 << 10),
            ("8192", 8192),
            ("8192B", 8192),
            ("0x2000", 8192),
            ("020000", 8192),
            ("0", 0),
            ("1g", 1 << 30),
            ("1T", 1 << 40),
        ];
        for (text, bytes) in good {
            assert_eq!(parse(text.as_bytes()), Some(bytes), "{text}");
        }
        for bad in
            ["", "M", "3M", "4MB", "-4K", "4 K", "0x", "99999999999999999999", "16777216T", "four"]
        {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
