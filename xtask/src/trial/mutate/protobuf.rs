//! Damages protocol buffers without their schema: fields with other values, missing, repeated, swapped or truncated.

use super::super::choices::Choices;
use super::bytes::damage_bytes;

/// A field as stored.
struct Field {
    number: u64,
    wire: u8,
    /// Value, without the key and without the length.
    value: Vec<u8>,
}

/// Changes one field, at any depth. Enclosing lengths are adjusted, except once in ten times.
pub fn edit(message: &[u8], r: &mut Choices) -> Vec<u8> {
    let Some(mut fields) = parse(message).filter(|f| !f.is_empty()) else {
        let mut bytes = message.to_vec();
        damage_bytes(&mut bytes, r);
        return bytes;
    };
    let i = r.below(fields.len());
    let inside = fields[i].wire == 2 && parse(&fields[i].value).is_some_and(|f| !f.is_empty());
    if inside && !r.once_in(6) {
        fields[i].value = edit(&fields[i].value, r);
        return write(&fields, r);
    }
    let field = &mut fields[i];
    match r.below(9) {
        0 => {
            fields.remove(i);
        }
        1 => {
            let (number, wire, value) = (field.number, field.wire, field.value.clone());
            fields.insert(i, Field { number, wire, value });
        }
        2 => {
            let j = r.below(fields.len());
            fields.swap(i, j);
        }
        3 => field.number = if r.once_in(2) { 1 + r.below(20) as u64 } else { r.edge() >> 3 },
        4 => field.wire = *r.pick(&[0, 1, 2, 5]),
        _ => match field.wire {
            0 => field.value = varint(if r.once_in(2) { r.below(64) as u64 } else { r.edge() }),
            2 => damage_bytes(&mut field.value, r),
            _ => {
                let value = if r.once_in(3) { f64::NAN.to_bits() } else { r.edge() };
                let n = field.value.len();
                field.value.copy_from_slice(&value.to_le_bytes()[..n]);
            }
        },
    }
    write(&fields, r)
}

fn parse(mut rest: &[u8]) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let key = read_varint(&mut rest)?;
        let (number, wire) = (key >> 3, (key & 7) as u8);
        let start = rest;
        let len = match wire {
            0 => {
                read_varint(&mut rest)?;
                start.len() - rest.len()
            }
            1 => 8,
            2 => read_varint(&mut rest)? as usize,
            5 => 4,
            _ => return None,
        };
        let from = if wire == 0 { start } else { rest };
        let value = from.get(..len)?.to_vec();
        rest = &from[len..];
        if number == 0 {
            return None;
        }
        fields.push(Field { number, wire, value });
    }
    Some(fields)
}

fn write(fields: &[Field], r: &mut Choices) -> Vec<u8> {
    let mut out = Vec::new();
    for field in fields {
        out.extend(varint(field.number << 3 | u64::from(field.wire)));
        if field.wire == 2 {
            let lie = r.once_in(200);
            out.extend(varint(if lie { r.edge() } else { field.value.len() as u64 }));
        }
        out.extend(&field.value);
    }
    out
}

fn read_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for i in 0..10 {
        let byte = *rest.get(i)?;
        value |= u64::from(byte & 0x7f).checked_shl(7 * i as u32)?;
        if byte < 0x80 {
            *rest = &rest[i + 1..];
            return Some(value);
        }
    }
    None
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}
