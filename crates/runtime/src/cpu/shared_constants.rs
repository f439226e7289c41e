//! Constants of a program, made once for all token counts and shapes that the program is compiled for.

use super::Options;
use super::weights::Constant;
use crate::tensor::Tensor;
use anemoe_io::locked;
use anemoe_mlpackage::package::Package;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Results of a constant operation; the joint sparse forms have two results.
pub(super) type Results = SmallVec<[Constant; 1]>;

/// Package, options and known constants for compiling a function.
#[derive(Clone, Copy)]
pub(super) struct CompileContext<'a> {
    pub package: &'a Arc<Package>,
    pub options: Options,
    /// Constants that the function shares with others: equal names have equal values.
    pub constants: Option<&'a SharedConstants>,
}

/// Results of a program's constant operations and its decoded weights, by name.
///
/// Decoding scales and tables and preparing them for products takes long, and does not depend on the token count.
#[derive(Default)]
pub(super) struct SharedConstants {
    results: Mutex<HashMap<String, Results>>,
    decoded: Mutex<HashMap<String, Arc<Tensor>>>,
}

impl SharedConstants {
    /// Returns the results of the operation whose first result is `name`; makes them with `make` the first time.
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

    /// Returns the dense tensor of the weight `name`; makes it with `make` the first time.
    pub fn decoded(&self, name: &str, make: impl FnOnce() -> Tensor) -> Arc<Tensor> {
        if let Some(known) = locked(&self.decoded).get(name) {
            return known.clone();
        }
        let made = Arc::new(make());
        locked(&self.decoded).insert(name.to_string(), made.clone());
        made
    }
}
