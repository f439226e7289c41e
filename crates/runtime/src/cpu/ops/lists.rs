//! Lists: `make_list`, `list_read`, `list_write`, `list_gather`, `list_scatter`, `list_length`.
//!
//! The elements of a list have one shape, so a list is a tensor whose first axis counts them. Elements whose shape the program leaves
//! open are empty until one is written.

use super::elementwise_unary::copy;
use super::operands::{OpContext, OpResult};
use super::scatter_gather::copy_slices;
use super::shape::{count, invalid, unsupported};
use super::tensor_operation::filled;
use crate::tensor::{Tensor, TensorElement, with_elements};

pub(super) fn make_list(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let length = c.size("init_length", 1)?;
    let Some(declared) = c.outputs.first() else { return invalid("no output") };
    let mut shape = vec![length];
    let elements = declared.dims.get(1..).unwrap_or(&[]);
    shape.extend(elements.iter().map(|d| d.fixed().and_then(|n| usize::try_from(n).ok()).unwrap_or(0)));
    filled(None, &shape, declared.dtype, &mut out[0])
}

/// Returns the list; an element of it has all axes but the first.
fn list<'a>(c: &OpContext<'a>) -> OpResult<&'a Tensor> {
    let list = c.arg("ls")?;
    if list.rank() == 0 { invalid("parameter `ls` is no list") } else { Ok(list) }
}

/// Returns the places that indices name; `length` bounds them.
fn places(indices: &[i32], length: usize) -> OpResult<Vec<usize>> {
    let place = |&i: &i32| match usize::try_from(i) {
        Ok(i) if i < length => Ok(i),
        _ => invalid(format!("index {i} of a list of {length} elements")),
    };
    indices.iter().map(place).collect()
}

/// Computes `list_read` and `list_gather`.
pub(super) fn gather(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let list = list(c)?;
    let single = c.op == "list_read";
    let indices = c.required_ints(if single { "index" } else { "indices" })?;
    if single && indices.len() != 1 {
        return invalid(format!("{} values of `index`, expected one", indices.len()));
    }
    let n: usize = list.shape[1..].iter().product();
    let from = places(indices, list.shape[0])?.into_iter().map(|i| i * n).collect::<Vec<_>>();
    let mut shape = list.shape[1..].to_vec();
    if !single {
        shape.insert(0, indices.len());
    }
    count(&shape)?;
    copy_slices(list, &shape, n, &from, &mut out[0])
}

/// Computes `list_write` and `list_scatter`; an index behind the last element makes the list longer.
pub(super) fn scatter(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (list, value) = (list(c)?, c.arg("value")?);
    let single = c.op == "list_write";
    let indices = c.required_ints(if single { "index" } else { "indices" })?;
    let element = match (single, value.shape.split_first()) {
        (true, _) if indices.len() == 1 => value.shape.as_slice(),
        (false, Some((&n, element))) if n == indices.len() => element,
        _ => return invalid(format!("{} indices for a value of shape {:?}", indices.len(), value.shape)),
    };
    let n: usize = element.iter().product();
    let needed = indices.iter().max().map_or(0, |&i| (i64::from(i) + 1).max(0) as usize);
    let to = places(indices, needed)?;
    let mut shape = vec![list.shape[0].max(needed)];
    shape.extend(element);
    count(&shape)?;
    // Elements of another shape are those that no write has shaped yet.
    let old = if list.shape[1..] == *element {
        list.len()
    } else if list.is_empty() {
        0
    } else {
        return invalid(format!("a value of shape {element:?} for elements of shape {:?}", &list.shape[1..]));
    };
    fn write<T: TensorElement>(y: &mut [T], old: &[T], value: &[T], n: usize, to: &[usize]) {
        y[..old.len()].copy_from_slice(old);
        y[old.len()..].fill(T::default());
        for (&i, value) in to.iter().zip(value.chunks_exact(n.max(1))) {
            y[i * n..][..n].copy_from_slice(value);
        }
    }
    with_elements!(
        F32 | I32 | Bool,
        (&list.data, &value.data),
        |l, v| write(out[0].reset(&shape), &l[..old], v, n, &to),
        return unsupported("a value of another type than the list's elements")
    );
    Ok(())
}

pub(super) fn length(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let n = list(c)?.shape[0];
    let n = Tensor::i32(&[], vec![i32::try_from(n).unwrap_or(i32::MAX)]);
    copy(&n, &[], &mut out[0]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_mlpackage::mil::{DataType, Dim, TensorType};

    fn run(function: super::super::OpFunction, op: &str, inputs: &[(&str, &Tensor)]) -> OpResult<Tensor> {
        let open = TensorType::new(DataType::Float32, vec![Dim::Unknown, Dim::Unknown]);
        let mut out = [Tensor::default()];
        function(&OpContext { op, inputs, values: &[], outputs: &[open] }, &mut out)?;
        let [out] = out;
        Ok(out)
    }

    #[test]
    fn lists_grow_and_are_read() {
        let at = |i: i32| Tensor::i32(&[], vec![i]);
        let list = run(make_list, "make_list", &[("init_length", &at(2))]).unwrap();
        assert_eq!(list.shape, [2, 0]);
        let value = Tensor::f32(&[2], vec![1.0, 2.0]);
        let list =
            run(scatter, "list_write", &[("ls", &list), ("index", &at(2)), ("value", &value)]).unwrap();
        assert_eq!(list, Tensor::f32(&[3, 2], vec![0.0, 0.0, 0.0, 0.0, 1.0, 2.0]));
        let (two, values) = (Tensor::i32(&[2], vec![0, 3]), Tensor::f32(&[2, 2], vec![3.0, 4.0, 5.0, 6.0]));
        let list =
            run(scatter, "list_scatter", &[("ls", &list), ("indices", &two), ("value", &values)]).unwrap();
        assert_eq!(run(length, "list_length", &[("ls", &list)]).unwrap(), at(4));
        assert_eq!(run(gather, "list_gather", &[("ls", &list), ("indices", &two)]).unwrap(), values);
        assert_eq!(run(gather, "list_read", &[("ls", &list), ("index", &at(2))]).unwrap(), value);
        let beyond = run(gather, "list_read", &[("ls", &list), ("index", &at(4))]);
        assert!(beyond.unwrap_err().to_string().contains("index 4 of a list of 4"));
        let other = Tensor::f32(&[3], vec![0.0; 3]);
        let refused = run(scatter, "list_write", &[("ls", &list), ("index", &at(0)), ("value", &other)]);
        assert!(refused.unwrap_err().to_string().contains("elements of shape"));
        let negative = run(scatter, "list_write", &[("ls", &list), ("index", &at(-1)), ("value", &value)]);
        assert!(negative.is_err());
    }
}
