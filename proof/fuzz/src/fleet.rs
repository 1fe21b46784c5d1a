//! An agent of a fleet with a hostile controller, and a controller with a hostile agent.
//!
//! Random bytes are no JSON. So the input damages the messages of an honest peer: each three bytes
//! are a place and the byte that is put there.

use diskwright_fleet::testing;

/// The messages of an honest peer with the damage of `data`.
fn damaged(mut messages: Vec<u8>, data: &[u8]) -> Vec<u8> {
    for piece in data.as_chunks::<3>().0 {
        let place = usize::from(u16::from_le_bytes([piece[0], piece[1]])) % messages.len().max(1);
        if let Some(byte) = messages.get_mut(place) {
            *byte = piece[2];
        }
    }
    messages
}

/// An agent with a hostile controller.
pub fn fleet_agent(data: &[u8]) {
    testing::hostile_controller(data);
    testing::hostile_controller(&damaged(testing::messages_of_controller(), data));
}

/// A controller with a hostile agent.
pub fn fleet_controller(data: &[u8]) {
    testing::hostile_agent(data);
    testing::hostile_agent(&damaged(testing::messages_of_agent(), data));
}
