//! A loaded function: its model, and buffers that its calls reuse.

use super::arrays::{HostArray, read_array};
use super::failure::Failure;
use super::interface::{Interface, Slot, StatesKey};
use anemoe_runtime::tensor::Tensor;
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2::runtime::{AnyObject, ProtocolObject};
use objc2_core_ml::{
    MLDictionaryFeatureProvider, MLFeatureDescription, MLFeatureProvider, MLFeatureValue, MLModel,
    MLPredictionOptions, MLState,
};
use objc2_foundation::{NSDictionary, NSString};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most sets of input shapes for which a function keeps buffers; a function of fixed shapes has one set.
const KEPT_BUFFERS: usize = 8;

/// A loaded function.
pub(super) struct Instance {
    model: Retained<MLModel>,
    interface: Arc<Interface>,
    /// Buffers by the shapes of the inputs; the set used last is at the end.
    buffers: Vec<CallBuffers>,
}

/// States and caches of a sequence in a call.
pub(super) struct SequenceObjects<'a> {
    pub key: StatesKey,
    /// `None` where the function has no states.
    pub state: Option<&'a MLState>,
    /// Caches, each with the number of slots that the function takes.
    pub caches: Vec<&'a mut HostArray>,
}

/// Objects that calls with one set of shapes share, so that a call makes no array, value or dictionary. Where the
/// function takes caches, the first call of a sequence makes a feature value for each cache, a dictionary and its
/// provider; later calls make nothing.
struct CallBuffers {
    inputs: Vec<HostArray>,
    shapes: Vec<Vec<usize>>,
    names: Vec<Retained<NSString>>,
    values: Vec<Retained<AnyObject>>,
    /// Feature providers by sequence, whose caches are among the values; one provider for all sequences without caches.
    features: BTreeMap<Option<StatesKey>, Retained<MLDictionaryFeatureProvider>>,
    options: Retained<MLPredictionOptions>,
    outputs: Vec<BackedOutput>,
    /// Outputs with the cache rows of the call's own tokens, and their values.
    rows: Vec<(BackedOutput, Tensor)>,
}

/// An output, and its backing: memory that Core ML is asked to write it to.
struct BackedOutput {
    name: Retained<NSString>,
    backing: Option<HostArray>,
}

fn dictionary(
    names: &[Retained<NSString>],
    values: &[Retained<AnyObject>],
) -> Retained<NSDictionary<NSString, AnyObject>> {
    let names: Vec<&NSString> = names.iter().map(|n| &**n).collect();
    NSDictionary::from_retained_objects(&names, values)
}

/// Refuses a value that Core ML does not accept for a feature; the error names the feature.
fn check(
    described: &NSDictionary<NSString, MLFeatureDescription>,
    name: &NSString,
    value: &MLFeatureValue,
) -> Result<(), Failure> {
    match described.objectForKey(name) {
        // SAFETY: a plain question about two living objects.
        Some(feature) if unsafe { feature.isAllowedValue(value) } => Ok(()),
        Some(_) => Err(Failure::Misfit(format!(
            "`{name}`: the compiled model takes another shape or type than the package says"
        ))),
        None => Err(Failure::Misfit(format!("the compiled model has no `{name}`, which the package has"))),
    }
}

/// Makes the feature value of an array, and checks that its feature accepts it.
fn value_of(
    described: &NSDictionary<NSString, MLFeatureDescription>,
    name: &NSString,
    array: &HostArray,
) -> Result<Retained<AnyObject>, Failure> {
    // SAFETY: the array has the type and shape that it declares.
    let value = unsafe { MLFeatureValue::featureValueWithMultiArray(array.array()) };
    check(described, name, &value)?;
    Ok(Retained::into_super(Retained::into_super(value)))
}

impl BackedOutput {
    /// Copies an output of a prediction into a tensor.
    fn read(
        &self,
        result: &ProtocolObject<dyn MLFeatureProvider>,
        slot: &Slot,
        tensor: &mut Tensor,
    ) -> Result<(), Failure> {
        // SAFETY: plain getters of a result that the caller holds.
        let array =
            unsafe { result.featureValueForName(&self.name).and_then(|value| value.multiArrayValue()) };
        let array = array.ok_or_else(|| Failure::Misfit(format!("no array `{}` came out", slot.name)))?;
        // Core ML may leave a backing unused; then the output is an array of Core ML's own, with its own strides.
        let backing =
            self.backing.as_ref().filter(|b| Retained::as_ptr(b.array()) == Retained::as_ptr(&array));
        match backing {
            Some(backing) => backing.read(tensor).map_err(Failure::Misfit),
            None => read_array(&array, slot.element, tensor),
        }
    }
}

impl CallBuffers {
    fn new(model: &MLModel, interface: &Interface, shapes: Vec<Vec<usize>>) -> Result<CallBuffers, Failure> {
        // SAFETY: plain getters of a living model.
        let described = unsafe { model.modelDescription() };
        // SAFETY: as above.
        let (takes, gives) =
            unsafe { (described.inputDescriptionsByName(), described.outputDescriptionsByName()) };
        let (mut inputs, mut names, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (slot, shape) in interface.inputs.iter().zip(&shapes) {
            let array = HostArray::new(shape, slot.element)?;
            let name = NSString::from_str(&slot.name);
            values.push(value_of(&takes, &name, &array)?);
            names.push(name);
            inputs.push(array);
        }
        let (mut outputs, mut named, mut backings) = (Vec::new(), Vec::new(), Vec::new());
        let rows = interface.caches.iter().filter_map(|c| Some(&c.added.as_ref()?.rows));
        for slot in interface.outputs.iter().chain(rows) {
            let name = NSString::from_str(&slot.name);
            let mut backing = None;
            if let Some(shape) = &slot.shape {
                let array = HostArray::new(shape, slot.element)?;
                value_of(&gives, &name, &array)?;
                backings.push(Retained::into_super(Retained::into_super(array.array().clone())));
                named.push(name.clone());
                backing = Some(array);
            }
            outputs.push(BackedOutput { name, backing });
        }
        // SAFETY: a new object, and a dictionary of arrays.
        let options = unsafe { MLPredictionOptions::new() };
        if !named.is_empty() {
            // SAFETY: the dictionary's values are arrays.
            unsafe { options.setOutputBackings(&dictionary(&named, &backings)) };
        }
        let rows = outputs.split_off(interface.outputs.len());
        let rows = rows.into_iter().map(|output| (output, Tensor::default())).collect();
        let features = BTreeMap::new();
        Ok(CallBuffers { inputs, shapes, names, values, features, options, outputs, rows })
    }

    /// Returns the feature provider of the inputs and the caches of the sequence `key`.
    fn features(
        &mut self,
        model: &MLModel,
        interface: &Interface,
        key: Option<StatesKey>,
        caches: &[&mut HostArray],
    ) -> Result<Retained<MLDictionaryFeatureProvider>, Failure> {
        if let Some(made) = self.features.get(&key) {
            return Ok(made.clone());
        }
        // SAFETY: plain getters of a living model.
        let takes = unsafe { model.modelDescription().inputDescriptionsByName() };
        let (mut names, mut values) = (self.names.clone(), self.values.clone());
        for (slot, array) in interface.caches.iter().zip(caches) {
            let name = NSString::from_str(&slot.cache.name);
            values.push(value_of(&takes, &name, array)?);
            names.push(name);
        }
        // SAFETY: every value of the dictionary is a feature value.
        let made = unsafe {
            MLDictionaryFeatureProvider::initWithDictionary_error(
                MLDictionaryFeatureProvider::alloc(),
                &dictionary(&names, &values),
            )
        };
        let made = made.map_err(|e| Failure::reported(&e))?;
        self.features.insert(key, made.clone());
        Ok(made)
    }
}

impl Instance {
    /// Makes an instance of a loaded model.
    pub fn new(model: Retained<MLModel>, interface: Arc<Interface>) -> Instance {
        Instance { model, interface, buffers: Vec::new() }
    }

    /// Makes the states of a new sequence, all zero.
    pub fn new_state(&self) -> Retained<MLState> {
        // SAFETY: the model has states.
        unsafe { self.model.newState() }
    }

    /// Tells whether predictions take states.
    pub fn takes_state(&self) -> bool {
        self.interface.has_states
    }

    /// Iterates over the number of slots of each cache that predictions take.
    pub fn cache_slots(&self) -> impl Iterator<Item = usize> {
        self.interface.caches.iter().map(|c| c.cache.shape.get(2).copied().unwrap_or(0))
    }

    /// Drops the objects that hold a sequence's caches.
    pub fn forget(&mut self, key: StatesKey) {
        for buffers in &mut self.buffers {
            buffers.features.remove(&Some(key));
        }
    }

    /// Moves the buffers for the shapes of these inputs to the end; makes them if there are none.
    fn find_buffers(&mut self, inputs: &[&Tensor]) -> Result<&mut CallBuffers, Failure> {
        if inputs.len() != self.interface.inputs.len() {
            let (has, wants) = (inputs.len(), self.interface.inputs.len());
            return Err(Failure::Misfit(format!("{has} inputs, expected {wants}")));
        }
        for (slot, input) in self.interface.inputs.iter().zip(inputs) {
            if slot.shape.as_ref().is_some_and(|shape| *shape != input.shape) {
                let Slot { name, shape, .. } = slot;
                return Err(Failure::Misfit(format!(
                    "input `{name}`: shape {:?}, expected {shape:?}",
                    input.shape
                )));
            }
        }
        let fits = |b: &CallBuffers| b.shapes.iter().zip(inputs).all(|(shape, input)| *shape == input.shape);
        match self.buffers.iter().position(fits) {
            Some(i) => self.buffers[i..].rotate_left(1),
            None => {
                let shapes = inputs.iter().map(|i| i.shape.clone()).collect();
                let made = CallBuffers::new(&self.model, &self.interface, shapes)?;
                if self.buffers.len() >= KEPT_BUFFERS {
                    self.buffers.remove(0);
                }
                self.buffers.push(made);
            }
        }
        self.buffers.last_mut().ok_or(Failure::Absent)
    }

    /// Runs the function. Writes its results to the first of `outputs`, and rows of tokens to the sequence's caches.
    pub fn predict(
        &mut self,
        inputs: &[&Tensor],
        sequence: Option<SequenceObjects<'_>>,
        outputs: &mut Vec<Tensor>,
    ) -> Result<(), Failure> {
        let (model, interface) = (self.model.clone(), self.interface.clone());
        let (key, state, caches) = match sequence {
            Some(sequence) => (Some(sequence.key), sequence.state, sequence.caches),
            None => (None, None, Vec::new()),
        };
        if caches.len() < interface.caches.len() {
            return Err(Failure::Misfit("a sequence without the caches of the function".into()));
        }
        let key = key.filter(|_| !interface.caches.is_empty());
        let buffers = self.find_buffers(inputs)?;
        for ((array, input), slot) in buffers.inputs.iter_mut().zip(inputs).zip(&interface.inputs) {
            array.write(input).map_err(|what| Failure::Misfit(format!("input `{}`: {what}", slot.name)))?;
        }
        let features = buffers.features(&model, &interface, key, &caches)?;
        let features: &ProtocolObject<dyn MLFeatureProvider> = ProtocolObject::from_ref(&*features);
        // SAFETY: features, state and options are this model's, and one thread runs all predictions.
        let result = unsafe {
            match state {
                Some(state) => {
                    model.predictionFromFeatures_usingState_options_error(features, state, &buffers.options)
                }
                None => model.predictionFromFeatures_options_error(features, &buffers.options),
            }
        };
        let result = result.map_err(|e| Failure::reported(&e))?;
        outputs.resize_with(outputs.len().max(buffers.outputs.len()), Tensor::default);
        for ((output, slot), tensor) in buffers.outputs.iter().zip(&interface.outputs).zip(outputs) {
            output.read(&result, slot, tensor)?;
        }
        let added =
            interface.caches.iter().zip(caches).filter_map(|(c, cache)| Some((c.added.as_ref()?, cache)));
        for ((output, rows), (slot, cache)) in buffers.rows.iter_mut().zip(added) {
            output.read(&result, &slot.rows, rows)?;
            let written = cache.write_rows(rows, inputs[slot.place], slot.is_place_last);
            written.map_err(|what| Failure::Misfit(format!("output `{}`: {what}", slot.rows.name)))?;
        }
        Ok(())
    }
}
