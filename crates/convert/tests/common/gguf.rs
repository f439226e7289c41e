//! Writer of GGUF files, right and wrong ones.
#![allow(dead_code)]

/// GGUF file to be written.
pub struct Gguf {
    pub version: u32,
    pub alignment: u64,
    /// Key, kind, and value as in the file.
    pub keys: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

/// Tensor of a GGUF file.
pub struct Tensor {
    pub name: Vec<u8>,
    /// Dimensions, fastest first.
    pub ne: Vec<u64>,
    /// GGML's number of the type.
    pub kind: u32,
    pub data: Vec<u8>,
    /// Offset to write instead of the right one.
    pub offset: Option<u64>,
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

impl Gguf {
    /// Makes a file of version 3 with nothing in it.
    pub fn new() -> Self {
        Gguf { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }

    pub fn raw(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.keys.push((key.as_bytes().to_vec(), kind, value.to_vec()));
    }

    pub fn u32(&mut self, key: &str, value: u32) {
        self.raw(key, 4, &value.to_le_bytes());
    }

    pub fn f32(&mut self, key: &str, value: f32) {
        self.raw(key, 6, &value.to_le_bytes());
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        self.raw(key, 7, &[value.into()]);
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.raw(key, 8, &string(value.as_bytes()));
    }

    fn array(&mut self, key: &str, kind: u32, len: usize, values: Vec<u8>) {
        let head = [&kind.to_le_bytes()[..], &(len as u64).to_le_bytes()].concat();
        self.raw(key, 9, &[head, values].concat());
    }

    pub fn bools(&mut self, key: &str, values: &[bool]) {
        self.array(key, 7, values.len(), values.iter().map(|&v| v.into()).collect());
    }

    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        self.array(key, 5, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect());
    }

    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        self.array(key, 6, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect());
    }

    pub fn texts<T: AsRef<str>>(&mut self, key: &str, values: &[T]) {
        let bytes = values.iter().flat_map(|v| string(v.as_ref().as_bytes())).collect();
        self.array(key, 8, values.len(), bytes);
    }

    /// Takes a key out again.
    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|(k, _, _)| k != key.as_bytes());
    }

    pub fn tensor(&mut self, name: &str, ne: &[u64], kind: u32, data: Vec<u8>) {
        self.tensors.push(Tensor { name: name.into(), ne: ne.to_vec(), kind, data, offset: None });
    }

    /// Adds a tensor in f32; the shape is outermost first.
    pub fn floats(&mut self, name: &str, shape: &[u64], values: &[f32]) {
        let ne: Vec<u64> = shape.iter().rev().copied().collect();
        self.tensor(name, &ne, 0, values.iter().flat_map(|v| v.to_le_bytes()).collect());
    }

    /// Returns the bytes of the file before the data.
    pub fn head(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.keys {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            out.extend(string(&t.name));
            out.extend((t.ne.len() as u32).to_le_bytes());
            out.extend(t.ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(t.offset.unwrap_or(offset).to_le_bytes());
            offset = (offset + t.data.len() as u64).next_multiple_of(self.alignment);
        }
        out
    }

    /// Returns the bytes of the whole file; nothing is behind the last tensor's data.
    pub fn write(&self) -> Vec<u8> {
        let mut out = self.head();
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
            out.extend(&t.data);
        }
        out
    }
}
