//! Derived tensors against their definitions.

use super::*;
use proptest::prelude::*;
use serde_json::Value;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Tensors in memory, which count the elements read.
#[derive(Default)]
struct Memory {
    tensors: Vec<TensorInfo>,
    floats: BTreeMap<String, Vec<f32>>,
    bytes: BTreeMap<String, Vec<u8>>,
    read: Arc<AtomicU64>,
}

impl Memory {
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> usize {
        let n: u64 = shape.iter().product();
        let bytes = dtype.tensor_bytes(shape).unwrap();
        let file = PathBuf::from(format!("{name}.file"));
        self.tensors.push(TensorInfo { name: name.into(), dtype, shape: shape.to_vec(), bytes, file });
        self.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        n as usize
    }

    /// Adds a tensor whose elements are `first`, `first` + 1, ...
    fn count(&mut self, name: &str, shape: &[u64], first: usize) -> Vec<f32> {
        let n = self.add(name, Dtype::F32, shape);
        let values: Vec<f32> = (first..first + n).map(|i| i as f32).collect();
        self.floats.insert(name.into(), values.clone());
        values
    }

    fn add_bytes(&mut self, name: &str, shape: &[u64], byte: impl Fn(usize) -> u8) {
        let n = self.add(name, Dtype::U8, shape);
        self.bytes.insert(name.into(), (0..n).map(byte).collect());
    }

    fn derive(self, name: &str, shape: &[u64], origin: TensorOrigin) -> Result<Derived> {
        let tensor = DerivedTensor { name: name.into(), shape: shape.to_vec(), origin };
        Derived::new(Box::new(self), vec![tensor], |_| false)
    }

    fn refused(self, shape: &[u64], origin: TensorOrigin) -> String {
        self.derive("d", shape, origin).err().expect("an error").to_string()
    }
}

impl TensorSource for Memory {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        self.read.fetch_add(out.len() as u64, Relaxed);
        self.info(name).unwrap().check_range(&range, out.len())?;
        let values = &self.floats[name][range.start as usize..range.end as usize];
        if let Some(i) = values.iter().position(|v| v.is_nan()) {
            let at = range.start + i as u64;
            return Err(Error::invalid("memory", format!("tensor `{name}`: element {at} is NaN")));
        }
        out.copy_from_slice(values);
        Ok(())
    }

    fn read_bytes(&self, name: &str, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.info(name).unwrap().check_range(&range, out.len())?;
        out.copy_from_slice(&self.bytes[name][range.start as usize..range.end as usize]);
        Ok(())
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        Ok(Some(SideFile::Bytes(name.into())))
    }
}

fn whole(derived: &Derived, name: &str) -> Vec<f32> {
    let n = derived.info(name).unwrap().elements();
    let mut out = vec![f32::NAN; n as usize];
    derived.read(name, 0..n, &mut out).unwrap();
    out
}

/// Checks that a tensor holds `expected`, and that every range of a sample is a part of it.
fn check_ranges(derived: &Derived, name: &str, expected: &[f32]) {
    assert_eq!(whole(derived, name), expected);
    let n = expected.len();
    let step = n.div_ceil(12).max(1);
    for start in (0..=n).step_by(step) {
        for end in (start..=n).step_by(step).chain([start + 1, n]).filter(|end| *end <= n) {
            let mut out = vec![f32::NAN; end - start];
            derived.read(name, start as u64..end as u64, &mut out).unwrap();
            assert_eq!(out, expected[start..end], "{start}..{end}");
        }
    }
}

/// Sorts rows by their remainder, as the definition says.
fn sorted_rows(rows: usize, interleaved: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rows).collect();
    order.sort_by_key(|row| row % interleaved);
    order
}

fn sorted(values: &[f32], [experts, rows, cols]: [usize; 3], interleaved: usize) -> Vec<f32> {
    let order = sorted_rows(rows, interleaved);
    let row = |e: usize, r: usize| &values[(e * rows + r) * cols..][..cols];
    (0..experts)
        .flat_map(|e| order.iter().flat_map(move |&r| row(e, r)).copied().collect::<Vec<_>>())
        .collect()
}

fn transposed(values: &[f32], [experts, rows, cols]: [usize; 3], interleaved: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for e in 0..experts {
        for r in sorted_rows(rows, interleaved) {
            out.extend((0..cols).map(|c| values[(e * cols + c) * rows + r]));
        }
    }
    out
}

fn dims(shape: [usize; 3]) -> [u64; 3] {
    shape.map(|n| n as u64)
}

#[test]
fn a_whole_tensor_under_another_name() {
    let mut m = Memory::default();
    let values = m.count("a", &[3, 5], 0);
    let d = m.derive("b", &[3, 5], TensorOrigin::Whole("a".into())).unwrap();
    check_ranges(&d, "b", &values);
    assert_eq!(d.origin("b", 7), (PathBuf::from("a.file"), "a".into()));
    assert!(d.info("a").is_none());
    assert_eq!(d.side_file("tokenizer.json").unwrap(), Some(SideFile::Bytes(b"tokenizer.json".into())));
    assert_eq!(d.files(), BTreeSet::from(["a.file".into()]));
    let err = d.read("b", 0..2, &mut [0.0]).unwrap_err().to_string();
    assert!(err.contains("elements 0..2 of tensor `b`"), "{err}");
}

#[test]
fn pieces_of_experts() {
    for (pieces, shape) in [(3, [2, 5].as_slice()), (6, &[1, 5]), (1, &[3, 2, 5])] {
        let mut m = Memory::default();
        let n = 30 / pieces;
        let names: Vec<String> = (0..pieces).map(|i| format!("e{i}")).collect();
        let values: Vec<f32> =
            names.iter().enumerate().flat_map(|(i, name)| m.count(name, shape, i * n)).collect();
        let d = m.derive("all", &[3, 2, 5], TensorOrigin::Pieces(names)).unwrap();
        check_ranges(&d, "all", &values);
        let info = d.info("all").unwrap();
        assert_eq!((info.bytes, info.file.as_path()), (120, Path::new("e0.file")));
        let last = format!("e{}", pieces - 1);
        assert_eq!(d.origin("all", 29), (format!("{last}.file").into(), last));
        assert_eq!(d.files().len(), pieces);
    }
}

#[test]
fn pieces_of_one_expert_and_of_no_expert() {
    let mut m = Memory::default();
    m.count("a", &[2, 5], 0);
    let origin = TensorOrigin::Pieces(vec!["a".into()]);
    check_ranges(
        &m.derive("d", &[1, 2, 5], origin).unwrap(),
        "d",
        &(0..10u8).map(f32::from).collect::<Vec<_>>(),
    );
    let mut m = Memory::default();
    let values = [m.count("gate", &[2, 5], 0), m.count("up", &[2, 5], 10)].concat();
    let origin = TensorOrigin::Pieces(vec!["gate".into(), "up".into()]);
    check_ranges(&m.derive("d", &[4, 5], origin).unwrap(), "d", &values);
}

#[test]
fn pieces_that_do_not_make_the_shape() {
    for (n, shape) in
        [(0, [4, 6, 5].as_slice()), (0, &[]), (3, &[4, 6, 5]), (5, &[4, 6, 5]), (8, &[4, 5]), (2, &[])]
    {
        let names = vec!["a".to_string(); n];
        let what = Memory::default().refused(shape, TensorOrigin::Pieces(names));
        assert!(
            what.contains(&format!("tensor `d`: shape {shape:?} is not that of {n} equal pieces")),
            "{what}"
        );
    }
}

#[test]
fn rows_sorted_by_their_remainder() {
    for interleaved in [1, 2, 3] {
        let mut m = Memory::default();
        let values = m.count("a", &[2, 6, 5], 0);
        let d = m.derive("d", &[2, 6, 5], TensorOrigin::Sorted { name: "a".into(), interleaved }).unwrap();
        check_ranges(&d, "d", &sorted(&values, [2, 6, 5], interleaved));
        let mut m = Memory::default();
        let values = m.count("a", &[3, 6], 0);
        let d = m.derive("d", &[3, 6], TensorOrigin::Sorted { name: "a".into(), interleaved }).unwrap();
        check_ranges(&d, "d", &sorted(&values, [3, 6, 1], interleaved));
    }
}

#[test]
fn swapped_axes() {
    for interleaved in [1, 2, 4] {
        for tile in [1, 7, 40, TILE] {
            let mut m = Memory::default();
            let values = m.count("a", &[2, 37, 8], 0);
            let origin = TensorOrigin::Transposed { name: "a".into(), interleaved };
            let mut d = m.derive("d", &[2, 8, 37], origin).unwrap();
            d.tiles.elements = tile;
            check_ranges(&d, "d", &transposed(&values, [2, 8, 37], interleaved));
        }
    }
}

/// Checks rows that are wider than a tile.
#[test]
fn swapped_axes_of_wide_rows() {
    let (rows, cols) = (70, TILE_COLS as usize + 9);
    let mut m = Memory::default();
    let values = m.count("a", &[1, cols as u64, rows as u64], 0);
    let origin = TensorOrigin::Transposed { name: "a".into(), interleaved: 2 };
    let d = m.derive("d", &[1, rows as u64, cols as u64], origin).unwrap();
    check_ranges(&d, "d", &transposed(&values, [1, rows, cols], 2));
}

/// Checks that reading rows one by one reads the source once for each kind of row.
#[test]
fn rows_of_swapped_axes_are_not_read_again_and_again() {
    let (rows, cols) = (600, 1000);
    let mut m = Memory::default();
    let values = m.count("a", &[1, cols as u64, rows as u64], 0);
    let read = Arc::clone(&m.read);
    let origin = TensorOrigin::Transposed { name: "a".into(), interleaved: 2 };
    let d = m.derive("d", &[1, rows as u64, cols as u64], origin).unwrap();
    let expected = transposed(&values, [1, rows, cols], 2);
    let mut out = vec![0f32; cols];
    for (r, row) in expected.chunks(cols).enumerate() {
        d.read("d", (r * cols) as u64..((r + 1) * cols) as u64, &mut out).unwrap();
        assert_eq!(out, row);
    }
    let read = read.load(Relaxed);
    assert!(read <= 2 * (rows * cols) as u64, "{read}");
}

#[test]
fn tiles_are_dropped_and_shared_by_threads() {
    let mut m = Memory::default();
    let values = m.count("a", &[4, 16, 32], 0);
    let origin = TensorOrigin::Transposed { name: "a".into(), interleaved: 2 };
    let mut d = m.derive("d", &[4, 32, 16], origin).unwrap();
    d.tiles.elements = 16;
    let expected = transposed(&values, [4, 32, 16], 2);
    std::thread::scope(|s| {
        for t in 0..4 {
            let (d, expected) = (&d, &expected);
            s.spawn(move || {
                for i in 0..200 {
                    let start = (i * 37 + t * 501) % 2000;
                    let mut out = [0f32; 48];
                    d.read("d", start as u64..start as u64 + 48, &mut out).unwrap();
                    assert_eq!(out, expected[start..start + 48]);
                }
            });
        }
    });
    assert!(locked(&d.tiles.kept).len() <= 2 * rayon::current_num_threads().max(2));
}

/// Adds MXFP4 and returns its values, from the definition.
fn mxfp4(m: &mut Memory, [experts, rows, cols]: [usize; 3]) -> Vec<f32> {
    let per_row = cols / 32;
    let byte = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u8;
    let power = |i: usize| (i * 11 % 253) as u8;
    let shape = dims([experts, rows, per_row]);
    m.add_bytes("w_blocks", &[&shape[..], &[16]].concat(), byte);
    m.add_bytes("w_scales", &shape, power);
    let value = |i: usize| {
        let nibble = byte(i / 2) >> (4 * (i % 2)) & 15;
        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
        let exact = magnitude * 2f64.powi(i32::from(power(i / 32)) - 127);
        (if nibble < 8 { exact } else { -exact }) as f32
    };
    (0..experts * rows * cols).map(value).collect()
}

fn mxfp4_origin(interleaved: usize) -> TensorOrigin {
    TensorOrigin::Mxfp4 { blocks: "w_blocks".into(), scales: "w_scales".into(), interleaved }
}

#[test]
fn mxfp4_in_bytes() {
    for interleaved in [1, 2] {
        let mut m = Memory::default();
        let shape = [2, 6, 96];
        let values = mxfp4(&mut m, shape);
        let d = m.derive("d", &dims(shape), mxfp4_origin(interleaved)).unwrap();
        let expected = sorted(&values, shape, interleaved);
        check_ranges(&d, "d", &expected);
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&whole(&d, "d")), bits(&expected));
        let info = d.info("d").unwrap();
        assert_eq!((info.dtype, info.bytes), (Dtype::Mxfp4, 2 * 6 * 3 * 17));
        assert_eq!(d.origin("d", 0), (PathBuf::from("w_blocks.file"), "w_blocks".into()));
    }
}

/// Checks a row with more blocks than are decoded at a time.
#[test]
fn mxfp4_of_wide_rows() {
    let mut m = Memory::default();
    let shape = [1, 2, 32 * (MXFP4_AT_ONCE as usize + 3)];
    let values = mxfp4(&mut m, shape);
    let d = m.derive("d", &dims(shape), mxfp4_origin(2)).unwrap();
    check_ranges(&d, "d", &values);
}

#[test]
fn mxfp4_with_a_scale_that_is_none() {
    for (e, says) in [(255, "NaN in E8M0"), (254, "too large"), (253, "too large")] {
        let mut m = Memory::default();
        m.add_bytes("w_blocks", &[1, 2, 2, 16], |_| 0x77);
        m.add_bytes("w_scales", &[1, 2, 2], |i| if i == 1 { e } else { 127 });
        let d = m.derive("d", &[1, 2, 64], mxfp4_origin(2)).unwrap();
        let mut out = [0f32; 64];
        assert!(d.read("d", 0..32, &mut out[..32]).is_ok());
        let err = d.read("d", 20..50, &mut out[..30]).unwrap_err().to_string();
        let names = format!("w_scales.file: invalid tensor `w_scales`: element 1 is {e}");
        assert!(err.contains(&names) && err.contains(says), "{err}");
    }
}

#[test]
fn the_largest_scale_of_zeros_and_halves() {
    let mut m = Memory::default();
    m.add_bytes("w_blocks", &[1, 1, 1, 16], |_| 0x20);
    m.add_bytes("w_scales", &[1, 1, 1], |_| 254);
    let d = m.derive("d", &[1, 1, 32], mxfp4_origin(1)).unwrap();
    assert_eq!(whole(&d, "d")[..2], [0.0, 2f32.powi(127)]);
}

#[test]
fn sources_of_another_shape() {
    let m = || {
        let mut m = Memory::default();
        m.count("a", &[2, 4, 6], 0);
        m
    };
    let a = || "a".to_string();
    let expects = |m: Memory, shape: &[u64], origin, expected: &str| {
        let what = m.refused(shape, origin);
        assert!(what.contains(&format!("tensor `a`: shape [2, 4, 6], expected {expected}")), "{what}");
    };
    expects(m(), &[2, 6, 4], TensorOrigin::Whole(a()), "[2, 6, 4]");
    expects(m(), &[1, 2, 4, 5], TensorOrigin::Pieces(vec![a()]), "[2, 4, 5]");
    expects(m(), &[2, 4, 6], TensorOrigin::Transposed { name: a(), interleaved: 2 }, "[2, 6, 4]");
    expects(m(), &[2, 6, 4], TensorOrigin::Sorted { name: a(), interleaved: 2 }, "[2, 6, 4]");
    let mut bytes = Memory::default();
    mxfp4(&mut bytes, [2, 4, 64]);
    let what = bytes.refused(&[2, 4, 96], mxfp4_origin(2));
    assert!(what.contains("tensor `w_blocks`: shape [2, 4, 2, 16], expected [2, 4, 3, 16]"), "{what}");
    let mut bytes = Memory::default();
    bytes.add_bytes("w_blocks", &[2, 4, 2, 16], |_| 0);
    bytes.add_bytes("w_scales", &[2, 4, 3], |_| 0);
    let what = bytes.refused(&[2, 4, 64], mxfp4_origin(2));
    assert!(what.contains("tensor `w_scales`: shape [2, 4, 3], expected [2, 4, 2]"), "{what}");
}

#[test]
fn shapes_that_an_origin_cannot_have() {
    let of = |shape: &[u64], origin| {
        let mut m = Memory::default();
        m.count("a", &[2, 4, 6], 0);
        m.refused(shape, origin)
    };
    let transposed = |interleaved| TensorOrigin::Transposed { name: "a".into(), interleaved };
    let sorted = |interleaved| TensorOrigin::Sorted { name: "a".into(), interleaved };
    assert!(of(&[2, 4], transposed(1)).contains("tensor `d`: shape [2, 4] has not three dimensions"));
    assert!(of(&[2], sorted(1)).contains("has not two or three dimensions"));
    assert!(of(&[2, 4, 6], sorted(3)).contains("has 4 rows, expected a multiple of 3"));
    assert!(of(&[2, 6, 4], transposed(4)).contains("has 6 rows, expected a multiple of 4"));
    assert!(of(&[2, 4, 6], sorted(0)).contains("multiple of 0"));
    assert!(of(&[2, 4, 65], mxfp4_origin(2)).contains("has rows of 65 elements, expected a multiple of 32"));
    assert!(of(&[2, 64], mxfp4_origin(2)).contains("has not three dimensions"));
    assert!(of(&[1 << 33, 1 << 33, 0], TensorOrigin::Whole("a".into())).contains("is too large"));
}

#[test]
fn sources_of_another_type() {
    let mut m = Memory::default();
    m.add("a", Dtype::Raw { name: "i64", bytes: 8 }, &[2, 4]);
    let what = m.refused(&[2, 4], TensorOrigin::Whole("a".into()));
    assert!(what.contains("a.file: unsupported tensor `a`: dtype I64, expected BF16"), "{what}");
    let mut m = Memory::default();
    m.count("w_blocks", &[2, 4, 2, 16], 0);
    m.add_bytes("w_scales", &[2, 4, 2], |_| 0);
    let what = m.refused(&[2, 4, 64], mxfp4_origin(2));
    assert!(what.contains("unsupported tensor `w_blocks`: dtype F32, expected U8"), "{what}");
}

#[test]
fn missing_superfluous_and_double_tensors() {
    let m = || {
        let mut m = Memory::default();
        m.count("a", &[2], 0);
        m.count("b", &[2], 0);
        m
    };
    let a = |name: &str| DerivedTensor {
        name: name.into(),
        shape: vec![2],
        origin: TensorOrigin::Whole("a".into()),
    };
    let what = m().refused(&[2], TensorOrigin::Whole("c".into()));
    assert!(what.contains("memory: invalid checkpoint: tensor `c` [2] is missing"), "{what}");
    let what = m().refused(&[2], TensorOrigin::Whole("a".into()));
    assert!(what.contains("b.file: invalid tensor `b`: this model has none of that name"), "{what}");
    let what = Derived::new(Box::new(m()), vec![a("x"), a("x")], |_| true).err().unwrap().to_string();
    assert!(what.contains("tensor `x` is derived twice"), "{what}");
    let two = Derived::new(Box::new(m()), vec![a("y"), a("x")], |name| name == "b").unwrap();
    assert_eq!(two.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["x", "y"]);
    assert!(two.read("a", 0..1, &mut [0.0]).unwrap_err().to_string().contains("no tensor `a`"));
}

#[test]
fn a_wrong_value_is_named_in_its_own_tensor() {
    let mut m = Memory::default();
    m.count("a", &[2, 3, 4], 0);
    m.floats.get_mut("a").unwrap()[17] = f32::NAN;
    // Element 17 is expert 1, column 1, row 1: the first of the rows behind rows 0 and 2.
    let d = m.derive("d", &[2, 4, 3], TensorOrigin::Transposed { name: "a".into(), interleaved: 2 }).unwrap();
    let err = d.read("d", 12..24, &mut [0.0; 12]).unwrap_err().to_string();
    assert!(err.contains("tensor `a`: element 17 is NaN"), "{err}");
    assert_eq!(d.origin("d", 12 + 2 * 3 + 1), (PathBuf::from("a.file"), "a".into()));
}

#[test]
fn tensors_without_elements() {
    for shape in [[0, 4, 6], [2, 0, 6], [2, 4, 0]] {
        let [e, r, c] = shape;
        let mut m = Memory::default();
        m.count("s", &shape, 0);
        m.count("t", &[e, c, r], 0);
        let tensors = [
            ("a", TensorOrigin::Whole("s".into())),
            ("b", TensorOrigin::Sorted { name: "s".into(), interleaved: 2 }),
            ("c", TensorOrigin::Transposed { name: "t".into(), interleaved: 2 }),
        ];
        let tensors =
            tensors.map(|(name, origin)| DerivedTensor { name: name.into(), shape: shape.into(), origin });
        let d = Derived::new(Box::new(m), tensors.into(), |_| false).unwrap();
        for name in ["a", "b", "c"] {
            assert!(whole(&d, name).is_empty());
            d.origin(name, 0);
        }
    }
}

#[test]
fn a_checkpoint_keeps_the_rest() {
    let mut m = Memory::default();
    m.count("a", &[2], 3);
    let checkpoint = Checkpoint {
        name: "name".into(),
        path: "path".into(),
        config: Value::Bool(true),
        generation_config: None,
        source: Box::new(m),
        variants: Default::default(),
        remarks: Vec::new(),
    };
    let tensor = DerivedTensor { name: "x".into(), shape: vec![2], origin: TensorOrigin::Whole("a".into()) };
    let c = derive(checkpoint, vec![tensor], |_| false).unwrap();
    assert_eq!(
        (c.name.as_str(), &c.config, c.source.path()),
        ("name", &Value::Bool(true), Path::new("memory"))
    );
    let mut out = [0f32; 2];
    c.source.read("x", 0..2, &mut out).unwrap();
    assert_eq!(out, [3.0, 4.0]);
}

proptest! {
    /// Checks every origin at random shapes, tiles and ranges.
    #[test]
    fn any_range_is_that_of_the_definition(
        (experts, kinds, per_kind, cols) in (1usize..4, 1usize..4, 1usize..9, 1usize..41),
        tile in 1u64..200,
        cuts in proptest::collection::vec((0.0f64..=1.0, 0.0f64..=1.0), 1..12),
    ) {
        let rows = kinds * per_kind;
        let shape = [experts, rows, cols];
        let blocks = [experts, rows, 32 * cols.div_ceil(8)];
        let mut m = Memory::default();
        let stored = m.count("s", &dims(shape), 0);
        let swapped = m.count("t", &dims([experts, cols, rows]), 7);
        let pieces: Vec<String> = (0..experts * kinds).map(|i| format!("p{i}")).collect();
        let joined: Vec<f32> = pieces
            .iter()
            .enumerate()
            .flat_map(|(i, name)| m.count(name, &dims([1, per_kind, cols])[1..], 1000 * i))
            .collect();
        let packed = mxfp4(&mut m, blocks);
        let derived = |name: &str, shape, origin| {
            DerivedTensor { name: name.into(), shape: dims(shape).into(), origin }
        };
        let tensors = vec![
            derived("whole", shape, TensorOrigin::Whole("s".into())),
            derived("pieces", shape, TensorOrigin::Pieces(pieces)),
            derived("transposed", shape, TensorOrigin::Transposed { name: "t".into(), interleaved: kinds }),
            derived("sorted", shape, TensorOrigin::Sorted { name: "s".into(), interleaved: kinds }),
            derived("mxfp4", blocks, mxfp4_origin(kinds)),
        ];
        let mut d = Derived::new(Box::new(m), tensors, |_| false).unwrap();
        d.tiles.elements = tile;
        for (name, expected) in [
            ("whole", stored.clone()),
            ("pieces", joined),
            ("transposed", transposed(&swapped, shape, kinds)),
            ("sorted", sorted(&stored, shape, kinds)),
            ("mxfp4", sorted(&packed, blocks, kinds)),
        ] {
            for &(a, b) in &cuts {
                let [a, b] = [a, b].map(|cut| (cut * expected.len() as f64) as usize);
                let (start, end) = (a.min(b), a.max(b));
                let mut out = vec![f32::NAN; end - start];
                d.read(name, start as u64..end as u64, &mut out).unwrap();
                prop_assert_eq!(&out, &expected[start..end], "{} {}..{}", name, start, end);
                // The element's own tensor is a source of this one.
                if start < expected.len() {
                    let (_, own) = d.origin(name, start as u64);
                    prop_assert!(d.inner.info(&own).is_some());
                }
            }
        }
    }
}
