import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/**
 * Send a request to the Jupyter server, with the XSRF token of the page.
 *
 * Throws a `ResponseError` if the server refuses it, and a `NetworkError` without a server.
 */
export async function request(
  settings: ServerConnection.ISettings,
  path: string,
  init: RequestInit = {}
): Promise<Response> {
  const url = URLExt.join(settings.baseUrl, path);
  const response = await ServerConnection.makeRequest(url, init, settings);
  if (!response.ok) {
    throw await ServerConnection.ResponseError.create(response);
  }
  return response;
}
