//! Constants of a program, made once for all functions that are made of it for numbers of tokens or shapes.

use super::Options;
use super::weights::Constant;
use crate::tensor::Tensor;
use anemoe_io::locked;
use anemoe_mlpackage::package::Package;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Results of a constant operation; the joint sparse forms have two.
pub(super) type Results = SmallVec<[Constant; 1]>;

/// Package, options and known constants of a function that is compiled.
#[derive(Clone, Copy)]
pub(super) struct CompileContext<'a> {
    pub package: &'a Arc<Package>,
    pub options: Options,
    /// Constants that the function shares with others, which have the same values under the same names.
    pub constants: Option<&'a SharedConstants>,
}

/// Results of a program's constant operations, and its stored weights that were decoded, by name.
///
/// Decoding scales and tables, and preparing them for products, takes long and depends on no number of tokens.
#[derive(Default)]
pub(super) struct SharedConstants {
    results: Mutex<HashMap<String, Results>>,
    decoded: Mutex<HashMap<String, Arc<Tensor>>>,
}

impl SharedConstants {
    /// Results of the operation whose first result is `name`; those of `make` where none are known.
    ///
    /// # Errors
    /// Fails like `make`.
    pub fn results<E>(&self, name: &str, make: impl FnOnce() -> Result<Results, E>) -> Result<Results, E> {
        if let Some(known) = locked(&self.results).get(name) {
            return Ok(known.clone());
        }
        let made = make()?;
        locked(&self.results).insert(name.to_string(), made.clone());
        Ok(made)
    }

    /// The dense tensor of the weight `name`; that of `make` where it is not known.
    pub fn decoded(&self, name: &str, make: impl FnOnce() -> Tensor) -> Arc<Tensor> {
        if let Some(known) = locked(&self.decoded).get(name) {
            return known.clone();
        }
        let made = Arc::new(make());
        locked(&self.decoded).insert(name.to_string(), made.clone());
        made
    }
}
